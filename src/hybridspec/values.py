"""Checks of what a caller hands in, with messages that name the argument and stay one line."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any

__all__ = [
    "check_utf8",
    "flag",
    "integer",
    "listed",
    "number",
    "optional_integer",
    "optional_rates",
    "optional_text",
    "shown",
]

_MAX_INTEGER = 2**63 - 1
_MAX_SHOWN = 200  # characters of a value in a message


def shown(value: Any) -> str:
    """Return a value as a message shows it: never longer than a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return what counts as an integer, NumPy's too, as a plain one."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {shown(value)}")
    if not low <= found <= (_MAX_INTEGER if high is None else high):
        bound = f"in {low}..{high}"
        if high is None:
            bound = f"at least {low}" if found < low else f"at most {_MAX_INTEGER}"
        raise ValueError(f"{name}: expected an integer {bound}, got {shown(value)}")
    return found


def optional_integer(name: str, value: Any, low: int, high: int | None = None) -> int | None:
    """Return the same of what may be None."""
    return None if value is None else integer(name, value, low, high)


def number(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    """Return a real number, NumPy's too, as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not low <= found <= high or (above_low and found == low):
        opening = "(" if above_low else "["
        raise ValueError(
            f"{name}: expected a number in {opening}{low:g}, {high:g}], got {shown(value)}"
        )
    return found


def optional_text(name: str, value: Any) -> None:
    """Check a text, not an empty one, that may be None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: expected a text, got {shown(value)}")
    if value == "":
        raise ValueError(f"{name}: expected a text, got an empty one")


def flag(name: str, value: Any) -> None:
    """Check a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {shown(value)}")


def listed(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """Return a list as a tuple, an empty one for None."""
    if value is None:
        return ()
    has_items = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if not has_items or getattr(value, "ndim", 1) == 0:  # arrays of no dimension have no items
        raise TypeError(f"{name}: expected a list of {what}, got {shown(value)}")
    return tuple(value)


def check_utf8(name: str, texts: Iterable[str]) -> None:
    """Raise for half a surrogate pair, which bytes of a command line that are not UTF-8 become."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: expected what UTF-8 can write, got {shown(text)}") from None


def optional_rates(name: str, value: Any) -> tuple[float, ...] | None:
    """Return a list of probabilities, which is not empty, or None."""
    if value is None:
        return None
    rates = listed(name, value, "numbers")
    if not rates:
        raise ValueError(f"{name}: expected at least one number, got none")
    return tuple(number(name, rate, 0.0, 1.0) for rate in rates)
