"""Numbers as users have them: numpy's are as good as Python's."""

from numbers import Integral, Real
from typing import Any


def as_int(value: Any) -> Any:
    """A whole number of another library as an int; all else as it is, to be refused by whoever wanted one."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def as_float(value: Any) -> Any:
    """A number as a float; all else, such as a list of them, as it is."""
    return float(value) if isinstance(value, Real) else value


def is_count(value: Any) -> bool:
    """Whether it is an int of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
