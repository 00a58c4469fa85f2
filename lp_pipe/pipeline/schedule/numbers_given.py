"""Numbers as users have them: numpy's and torch's are as good as Python's."""

from numbers import Integral, Real
from typing import Any


def as_int(value: Any) -> Any:
    """A whole number of another library as an int; all else as it is, to be refused by whoever wanted one."""
    number = _inside(value)
    return int(number) if isinstance(number, Integral) and not isinstance(number, bool) else value


def as_float(value: Any) -> Any:
    """A number as a float; all else, such as a list of them, as it is."""
    number = _inside(value)
    return float(number) if isinstance(number, Real) and not isinstance(number, bool) else value


def is_count(value: Any) -> bool:
    """Whether it is an int of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _inside(value: Any) -> Any:
    """The one number of an array, or of a tensor, without dimensions."""
    return value.item() if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)) else value
