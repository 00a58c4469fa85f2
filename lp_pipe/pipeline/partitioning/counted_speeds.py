"""Stages on devices of a few speeds, in any order, as `BoundedSearch` goes through them."""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

import numpy as np

from lp_pipe.pipeline.partitioning.bounded_search import BoundedSearch, Kind, Step
from lp_pipe.pipeline.partitioning.cost import CostModel, Memory
from lp_pipe.pipeline.partitioning.min_devices import Ints
from lp_pipe.pipeline.partitioning.states import States
from lp_pipe.pipeline.partitioning.topology import Level

_MOST_COUNTS = 50_000
_MOST_REPLICAS = 8  # of a stage


class StageOnDevices(NamedTuple):
    """A stage between two states, on these devices."""

    start: int
    end: int
    devices: tuple[int, ...]


class CountedSpeeds:
    """A fast search on devices of a few speeds, in any order. The devices of a stage all have one speed.

    A place says how many devices of each speed are taken.
    """

    def __init__(
        self,
        states: States,
        level: Level,
        speeds: Sequence[float],
        model: CostModel,
        memory: Memory | None,
        max_replicas: int,
    ) -> None:
        self._devices = {
            speed: [device for device, own in enumerate(speeds) if own == speed] for speed in sorted(set(speeds))
        }
        counts = _DeviceCounts([len(own) for own in self._devices.values()], list(self._devices), max_replicas)
        self._search = BoundedSearch(states, [level], model, memory, counts)

    def within(self, limit: float) -> list[StageOnDevices]:
        """Find stages of which none, and no side of a boundary, takes more seconds; empty where none are found."""
        free = {speed: iter(devices) for speed, devices in self._devices.items()}
        return [
            StageOnDevices(stage.start, stage.end, tuple(islice(free[stage.kind.speed], stage.kind.replicas[0])))
            for stage in self._search.within(limit)
        ]


class _DeviceCounts:
    """The places of `CountedSpeeds`. counts: devices by speed."""

    def __init__(self, counts: Sequence[int], speeds: Sequence[float], max_replicas: int) -> None:
        self.count = sum(counts)
        taken: Ints = np.indices([count + 1 for count in counts]).reshape(len(counts), -1)  # by speed and place
        self.level_at: Ints = np.zeros(taken.shape[1], dtype=int)
        most = min(max_replicas, _MOST_REPLICAS)
        numbered = [(replicas, number) for replicas in range(1, most + 1) for number in range(len(speeds))]
        self.kinds: Sequence[Kind] = [Kind((replicas,), speeds[number]) for replicas, number in numbered]
        self.steps: Sequence[Step] = list(self._steps(counts, taken, numbered))

    def _steps(self, counts: Sequence[int], taken: Ints, numbered: Sequence[tuple[int, int]]) -> Iterator[Step]:
        """Yield the steps in the order of the devices that are taken.

        numbered: replicas and the number of the speed, by kind.
        """
        total = taken.sum(axis=0)
        for devices in range(1, self.count + 1):
            places = np.flatnonzero(total == devices)
            for kind, (replicas, speed) in enumerate(numbered):
                target = places[taken[speed, places] >= replicas]
                source = target - replicas * prod(count + 1 for count in counts[speed + 1 :])
                shares = np.full(len(target), replicas)
                yield Step(source, target, np.full(len(target), kind), shares, shares)


def can_count(speeds: Sequence[float]) -> bool:
    """Return whether the devices can be counted by speed in so few ways that a search takes a second or two."""
    return prod(list(speeds).count(kind) + 1 for kind in set(speeds)) <= _MOST_COUNTS
