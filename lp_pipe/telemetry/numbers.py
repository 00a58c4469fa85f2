"""What nodes log as numbers, made plain ones: the same in every launch mode, and taken at the call."""

import operator
from collections.abc import Mapping
from typing import Any


def as_numbers(metrics: Mapping[str, Any], step: Any) -> tuple[dict[str, float], int | None]:
    """The arguments of `log_metrics`, without numpy's and torch's kinds of numbers.

    Raises:
        TypeError: no dict, a value is no number, a name no text, or step no int.
        ValueError: a name cannot be encoded.
    """
    if not hasattr(metrics, "items"):
        raise TypeError(f"log_metrics({metrics!r}): a dict of names and numbers is needed, such as {{'loss': 0.5}}")
    return {_name(name): _number(name, value) for name, value in metrics.items()}, _step(step)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"log_metrics: the name {name!r} of a metric is not a str")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"log_metrics: the name {name!r} of a metric has half a surrogate pair: no text") from error
    return str(name)


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):  # float() would read some of them
            raise TypeError("a text")
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: torch, of several elements
        raise TypeError(
            f"log_metrics: {name!r} is of type {type(value).__name__}, but one number is needed ({error})"
        ) from error


def _step(step: Any) -> int | None:
    try:
        return None if step is None else operator.index(step)
    except TypeError:
        raise TypeError(f"log_metrics: step={step!r}: an int is needed") from None
