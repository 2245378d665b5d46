"""Checks of single values. Each returns the value as a plain Python one, or says what is wrong with it."""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import Any, Final

MAX_INT32: Final = 2**31 - 1


def integer(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    """Returns `value` as an int, or raises ValueError naming field, value, rule and remedy."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {reprlib.repr(value)}{hint}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}{hint}")
    return int(value)


def real(name: str, value: Any, rule: str, accepts: Any) -> float:
    """Returns `value` as a finite float that `accepts` allows, or raises ValueError with `rule`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number {rule}, got {reprlib.repr(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int that no float can hold
        number = math.inf
    if not math.isfinite(number) or not accepts(number):
        raise ValueError(f"{name} must be a number {rule}, got {reprlib.repr(value)}")
    return number


def listed(name: str, value: Any, of: str) -> tuple[Any, ...]:
    """Returns what `value` holds, or raises ValueError; text and bytes are not lists of their parts."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name} must be a list of {of}, got {reprlib.repr(value)}") from None
