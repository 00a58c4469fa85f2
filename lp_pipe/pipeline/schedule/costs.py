"""The seconds that the actions of each stage take."""

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.ir import Op
from lp_pipe.pipeline.schedule.numbers_given import as_float
from lp_pipe.telemetry.file_writing import write_atomically

Seconds = float | Sequence[float]

_MOST_SECONDS = 1e100  # so that no sum of them is infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The seconds that the actions of a stage take: one number, or one per virtual stage."""

    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the JSON that `save` writes: the three names, each with a number or a list of numbers.

        Raises:
            ScheduleError: the file cannot be read, or is something else; names the key.
        """
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ScheduleError(f"{path}: cannot read costs: {error}") from error
        return cls(**_checked(path, read, [field.name for field in fields(cls)]))

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads."""
        values = {name: _plain(value) for name, value in asdict(self).items()}
        write_atomically(path, json.dumps(values) + "\n")

    def durations(self, stages: int) -> dict[Op, list[float]]:
        """Return the seconds by op, then by virtual stage; "B" takes as long as "I" and "W".

        Raises:
            ScheduleError: a list has not one number for each of the stages, or a number is negative.
        """
        forward, inputs, weights = (
            one_each(value, stages, f"costs.{name}", "virtual stage") for name, value in asdict(self).items()
        )
        return {"F": forward, "I": inputs, "W": weights, "B": [i + w for i, w in zip(inputs, weights, strict=True)]}

    def cut_into(self, stages: int, workers: int) -> "Costs":
        """Return the costs of the same model when it is cut into `stages` stages of equal shares.

        A number is what a stage takes where each of the workers has one; a list, of any length, is cut or joined.
        """
        return Costs(
            **{name: _recut(value, stages, workers, f"costs.{name}") for name, value in asdict(self).items()},
        )


class Divisible(Protocol):
    """The costs of a model that may be cut into any number of stages."""

    def cut_into(self, stages: int, workers: int) -> Costs:
        """Return the costs of that many stages, of which each worker has equally many.

        Raises:
            ScheduleError: the model cannot be cut so.
        """


def one_each(seconds: Seconds, count: int, what: str, unit: str) -> list[float]:
    """Return one number for each of `count` things.

    Raises:
        ScheduleError: there is another number of them, or one of them is none, negative or too large to be added up.
    """
    try:
        if isinstance(seconds, Mapping | str):  # float() would take the keys or letters
            raise TypeError
        given = as_float(seconds)
        values = [given] * count if isinstance(given, float) else [float(value) for value in given]
    except OverflowError:
        values = [float("inf")] * count
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"{what} is {seconds!r}: give seconds, one number or one per {unit}") from error
    if len(values) != count:
        raise ScheduleError(f"{what} has {len(values)} numbers: give one number, or {count}, one per {unit}")
    for value in values:
        if not 0 <= value <= _MOST_SECONDS:  # so that NaN is refused too
            raise ScheduleError(f"{what} is {value}: give seconds of at least 0, and {_MOST_SECONDS:g} at most")
    return values


def _recut(seconds: Seconds, stages: int, workers: int, what: str) -> list[float]:
    """Return the seconds of `stages` stages, of which stage s has the share from s/n to (s + 1)/n of the model.

    Neither of the two counts needs to divide the other.
    """
    given = as_float(seconds)
    count = len(given) if isinstance(given, Sized) else workers
    pieces = one_each(seconds, count, what, "virtual stage")
    if not pieces:
        raise ScheduleError(f"{what} is empty: give one number, or one per virtual stage")
    joined = [0.0] * stages
    for piece, value in enumerate(pieces):
        first, end = piece * stages, (piece + 1) * stages  # in units of 1/(count * stages) of the model
        for stage in range(first // count, -(-end // count)):
            overlap = min(end, (stage + 1) * count) - max(first, stage * count)
            joined[stage] += value * overlap / stages
    return joined


def _checked(path: str | Path, read: Any, names: Sequence[str]) -> Mapping[str, Seconds]:
    if not isinstance(read, dict):
        raise ScheduleError(f"{path}: costs are an object with the keys {', '.join(names)}")
    for name in read:
        if name not in names:
            raise ScheduleError(f"{path}: unknown key {name!r}: costs have {', '.join(names)}")
    for name in names:
        if name not in read:
            raise ScheduleError(f'{path}: "{name}" is missing: give seconds, one number or one per virtual stage')
        values = read[name] if isinstance(read[name], list) else [read[name]]
        if not values or not all(_is_seconds(value) for value in values):
            raise ScheduleError(
                f'{path}: "{name}" is {json.dumps(read[name])}: give seconds of at least 0, one number or a list'
            )
    return read


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _plain(value: Seconds) -> float | list[float]:
    given = as_float(value)
    return given if isinstance(given, float) else [float(each) for each in given]
