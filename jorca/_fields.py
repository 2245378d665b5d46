"""Checks of the fields of frozen configs, where they are made."""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any, get_args

from jorca.request import JorcaError


class ConfigError(JorcaError, ValueError):
    """A configuration breaks a rule; the message names field, value, rule and remedy."""


def check_int(config: Any, name: str, low: int, optional: bool = False) -> None:
    """Holds the field to its rule and makes a Python int of it, which no product overflows."""
    value = getattr(config, name)
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
    object.__setattr__(config, name, int(value))


def check_float(config: Any, name: str, rule: str, low: float, high: float) -> None:
    """Holds the field between `low` and `high`, both excluded, and makes a Python float of it."""
    value = getattr(config, name)
    number = math.nan  # lies between no two numbers
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int that no float can hold
            number = float(value)
    if not low < number < high:
        raise ConfigError(f"{name} must be a number {rule}, got {value!r}")
    object.__setattr__(config, name, number)


def check_choice(config: Any, name: str, choices: Any) -> None:
    """Holds the field to one of the names in `choices`, a Literal or a tuple."""
    value, names = getattr(config, name), get_args(choices) or choices
    if not isinstance(value, str) or value not in names:
        raise ConfigError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def check_bools(config: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name} must be True or False, got {getattr(config, name)!r}")


def check_address(config: Any, name: str) -> None:
    """Holds the field, if it is set, to HOST:PORT; the port behind it must exist, too."""
    value = getattr(config, name)
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if value is not None and not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65535):
        raise ConfigError(f"{name} must be HOST:PORT with a port below 65535, got {value!r}")
