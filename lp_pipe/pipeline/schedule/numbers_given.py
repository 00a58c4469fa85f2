"""Numbers as users have them: those of numpy and torch are as good as Python's."""

from numbers import Integral, Real
from typing import Any


def as_int(value: Any) -> Any:
    """Return a whole number of another library as an int, and all else as it is, to be refused by the caller."""
    number = _inside(value)
    return int(number) if isinstance(number, Integral) and not isinstance(number, bool) else value


def as_float(value: Any) -> Any:
    """Return a number as a float, and all else, such as a list of them, as it is."""
    number = _inside(value)
    return float(number) if isinstance(number, Real) and not isinstance(number, bool) else value


def is_count(value: Any) -> bool:
    """Return whether the value is an int of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _inside(value: Any) -> Any:
    """Return the one number of an array, or of a tensor, without dimensions."""
    return value.item() if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)) else value
