"""The hyperparameters of an experiment: what may be drawn, and the drawing of one trial's values."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from random import Random
from typing import Any

Params = dict[str, Any]  # nested as the space is


@dataclass(frozen=True)
class UniformRange:
    """A real number between `low` and `high`, each equally likely."""

    low: float
    high: float

    def at(self, share: float) -> float:
        """Return the value at this share (0 to 1) of the range."""
        return min(self.high, self.low + share * (self.high - self.low))


@dataclass(frozen=True)
class LogRange:
    """A positive real number between `low` and `high` with a uniform logarithm."""

    low: float
    high: float

    def at(self, share: float) -> float:
        """Return the value at this share (0 to 1) of the range of logarithms."""
        exponent = math.log(self.low) + share * (math.log(self.high) - math.log(self.low))
        return min(self.high, max(self.low, math.exp(exponent)))


@dataclass(frozen=True)
class IntegerRange:
    """A whole number from `low` to `high`, both included."""

    low: int
    high: int

    def at(self, share: float) -> int:
        return min(self.high, self.low + math.floor(share * (self.high - self.low + 1)))

    def values(self) -> Sequence[int]:
        return range(self.low, self.high + 1)


@dataclass(frozen=True)
class Choice:
    """A choice among some values, each equally likely."""

    options: tuple[Any, ...]

    def at(self, share: float) -> Any:
        return self.options[min(len(self.options) - 1, math.floor(share * len(self.options)))]

    def values(self) -> Sequence[Any]:
        return self.options


@dataclass(frozen=True)
class Constant:
    """A value that is the same in every trial."""

    value: Any

    def at(self, share: float) -> Any:
        return self.value

    def values(self) -> Sequence[Any]:
        return (self.value,)


Dimension = UniformRange | LogRange | IntegerRange | Choice | Constant


def uniform(low: float, high: float) -> UniformRange:
    """Draw a real number from [low, high].

    Raises:
        ValueError: `low` is not below `high`, or one is not finite.
    """
    _check_range("uniform", low, high)
    return UniformRange(float(low), float(high))


def log(low: float, high: float) -> LogRange:
    """Draw a real number from [low, high] with a uniform logarithm, as suits learning rates.

    Raises:
        ValueError: `low` is not above 0 or not below `high`, or one is not finite.
    """
    _check_range("log", low, high)
    if low <= 0:
        raise ValueError(f"log({low}, {high}): both ends must be above 0, since the logarithm is drawn")
    return LogRange(float(low), float(high))


def integer(low: int, high: int) -> IntegerRange:
    """Draw a whole number from low, low + 1, …, high.

    Raises:
        ValueError: `low` is above `high`, or one is not a whole number.
    """
    if int(low) != low or int(high) != high or low > high:
        raise ValueError(f"integer({low}, {high}): two whole numbers are needed, the lower one first")
    return IntegerRange(int(low), int(high))


def choice(*options: Any) -> Choice:
    """Draw one of the options.

    Raises:
        ValueError: there are none.
    """
    if not options:
        raise ValueError("choice() needs at least one value: ls.choice(64, 128)")
    return Choice(options)


def constant(value: Any) -> Constant:
    """Give every trial the same value; the same as the plain value in a space."""
    return Constant(value)


def dimensions(space: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Dimension]]:
    """Yield the dotted name of each parameter (`opt.decay`) with what may be drawn for it, in the order of the space.

    Raises:
        ValueError: a name is not a non-empty str without a dot.
    """
    for name, value in space.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"{name!r} in a search space: a parameter's name is a str without dots")
        if isinstance(value, Mapping):
            yield from dimensions(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, Dimension) else Constant(value)


def nested(values: Mapping[str, Any]) -> Params:
    """Return parameters by dotted name as nested dicts."""
    params: Params = {}
    for name, value in values.items():
        *path, last = name.split(".")
        inner = params
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return params


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested parameters by dotted name."""
    values: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def draw(space: Mapping[str, Any], seed: int, trial: int) -> Params:
    """Return the parameters of a trial, which follow from the seed and the trial's id alone."""
    shares = Random(f"lp_pipe search {seed} {trial}")
    return nested({name: dimension.at(shares.random()) for name, dimension in dimensions(space)})


def grid(space: Mapping[str, Any]) -> list[Params]:
    """Return the parameters of every combination; the last parameter changes fastest.

    Raises:
        ValueError: a parameter has infinitely many values.
    """
    names, values = [], []
    for name, dimension in dimensions(space):
        if isinstance(dimension, UniformRange | LogRange):
            raise ValueError(
                f"{name} is drawn from a range, which has no grid: give the values, as ls.choice(0.1, 0.2)"
            )
        names.append(name)
        values.append(dimension.values())
    return [nested(dict(zip(names, combination, strict=True))) for combination in itertools.product(*values)]


def _check_range(what: str, low: float, high: float) -> None:
    are_numbers = isinstance(low, Real) and isinstance(high, Real) and math.isfinite(low) and math.isfinite(high)
    if not are_numbers or not low < high:
        raise ValueError(f"{what}({low!r}, {high!r}): two finite numbers are needed, the lower one first")
