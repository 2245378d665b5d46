"""Checks of single values. Each returns the value as a plain Python one, or says what is wrong with it."""

from __future__ import annotations

import math
import numbers
import reprlib
import struct
from collections.abc import Callable
from typing import Any, Final

MAX_INT32: Final = 2**31 - 1
_SMALLEST_NORMAL: Final = 2.0**-126  # of float32


def integer(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    """Returns `value` as an int, or raises ValueError naming field, value, rule and remedy."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {reprlib.repr(value)}{hint}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}{hint}")
    return int(value)


def real(name: str, value: Any, rule: str, accepts: Callable[[float], bool]) -> float:
    """Returns `value` as a float that is finite and that `accepts` allows in float32, or raises ValueError.

    Devices compute in float32, and some of them take subnormal numbers for 0: so does this.
    """
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = _in_float32(value)
    if not math.isfinite(number) or not accepts(number):
        raise ValueError(f"{name} must be a number {rule}, got {reprlib.repr(value)}")
    return float(value) if number else 0.0


def _in_float32(value: Any) -> float:
    """Returns the float32 next to a real number: infinite if it is too large, 0 if it would be subnormal."""
    try:
        (number,) = struct.unpack("f", struct.pack("f", float(value)))
    except OverflowError:
        return math.inf
    return number if abs(number) >= _SMALLEST_NORMAL else number * 0.0


def listed(name: str, value: Any, of: str) -> tuple[Any, ...]:
    """Returns what `value` holds, or raises ValueError; text and bytes are not lists of their parts."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name} must be a list of {of}, got {reprlib.repr(value)}") from None
