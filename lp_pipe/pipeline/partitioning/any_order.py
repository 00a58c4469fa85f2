"""A fast plan of a chain on devices of a few speeds, in any order; not always the best, but of all cuts, in a second.

By how many devices of each speed are taken: how far the last stages reach towards the first layer at most, if none
takes longer than a time that is asked for:

    reach[counts] = min over speeds v, r of the first state from which a stage with r devices of speed v gets to
                    reach[counts without those]

A stage has devices of one speed. To reach farthest is not always best: links differ by what crosses them.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from lp_pipe.pipeline.partitioning.cost import CostModel, Memory
from lp_pipe.pipeline.partitioning.min_devices import Ints
from lp_pipe.pipeline.partitioning.states import Floats, States
from lp_pipe.pipeline.partitioning.topology import Level

_MOST_COUNTS = 50_000
_MOST_REPLICAS = 8  # of a stage
_ROUNDING = 1 - 1e-9  # what stages need is told from sums over all layers


class StageOnDevices(NamedTuple):
    """A stage between two states, on these devices."""

    start: int
    end: int
    devices: tuple[int, ...]


def can_search(speeds: Sequence[float]) -> bool:
    """Whether there are so few counts of devices that they can be searched in a second."""
    return prod(list(speeds).count(kind) + 1 for kind in set(speeds)) <= _MOST_COUNTS


class AnyOrder:
    """One search. memory: of stages that do not recompute."""

    def __init__(
        self, states: States, level: Level, speeds: Sequence[float], model: CostModel, memory: Memory, max_replicas: int
    ) -> None:
        self._states = states
        self._level = level
        self._model = model
        self._memory = memory
        self._kinds = sorted(set(speeds))
        self._devices = [[place for place, speed in enumerate(speeds) if speed == kind] for kind in self._kinds]
        shape = [len(devices) + 1 for devices in self._devices]
        self._counts: Ints = np.indices(shape).reshape(len(shape), -1)  # by kind and place in the table
        self._steps = [int(np.prod(shape[kind + 1 :])) for kind in range(len(shape))]
        self._places = [np.flatnonzero(self._counts.sum(axis=0) == total) for total in range(len(speeds) + 1)]
        self._most_replicas = min(max_replicas, _MOST_REPLICAS)

    def within(self, limit: float) -> list[StageOnDevices]:
        """Stages of which none takes more seconds than that, nor a side of a boundary; empty where none are found."""
        last = self._states.count - 1
        reach = np.full(self._counts.shape[1], last + 1)
        reach[0] = last
        chosen = np.zeros((2, len(reach)), dtype=int)
        asked = _Reach(self._states, self._level, self._model, self._memory, limit)
        for total in range(1, len(self._places)):
            places = self._places[total]
            for replicas in range(1, min(self._most_replicas, total) + 1):
                for kind, speed in enumerate(self._kinds):
                    some = places[self._counts[kind, places] >= replicas]
                    found = asked.first(replicas, speed, total - replicas)[reach[some - replicas * self._steps[kind]]]
                    is_better = found < reach[some]
                    better = some[is_better]
                    reach[better] = found[is_better]
                    chosen[:, better] = [[kind], [replicas]]
            done = places[reach[places] == 0]
            if len(done):
                return self._served(int(done[0]), chosen, reach)
        return []

    def _served(self, place: int, chosen: Ints, reach: Ints) -> list[StageOnDevices]:
        free = [iter(devices) for devices in self._devices]
        stages = []
        while place:
            kind, replicas = (int(number) for number in chosen[:, place])
            behind = place - replicas * self._steps[kind]
            devices = tuple(next(free[kind]) for _ in range(replicas))
            stages.append(StageOnDevices(int(reach[place]), int(reach[behind]), devices))
            place = behind
        return stages


class _Reach:
    """From which state on a stage may be, by its end; there is one more end, of what is not reached."""

    def __init__(self, states: States, level: Level, model: CostModel, memory: Memory, limit: float) -> None:
        self._states = states
        self._level = level
        self._model = model
        self._memory = memory
        self._limit = limit
        self._by_time: dict[tuple[int, float], Ints] = {}
        self._by_memory: dict[tuple[int, int], Ints] = {}

    def first(self, replicas: int, speed: float, behind: int) -> Ints:
        """With so many replicas on devices of that speed, and so many devices behind it."""
        count = self._states.count
        ends = np.arange(count)
        side = self._model.boundary(self._states.crossing, replicas, self._level) <= self._limit
        first = np.maximum(self._in_time(replicas, speed), self._in_memory(replicas, behind))
        following = np.minimum.accumulate(np.where(side, ends, count)[::-1])[::-1]  # where a stage may start
        first = following[np.minimum(first, count - 1)]
        return np.append(np.where((first < ends) & side, first, count), count)

    def _in_time(self, replicas: int, speed: float) -> Ints:
        key = replicas, speed
        if key not in self._by_time:
            compute, allowed = self._states.compute / speed, self._limit * replicas
            exchange = self._model.exchange(self._states.parameters, replicas, self._level)
            latency = self._model.exchange(0.0, replicas, self._level)
            if self._model.name == "overlap":
                first = np.maximum(_first(compute, allowed), _first(exchange, allowed - latency))
            else:
                first = _first(compute + exchange, allowed - latency)
            self._by_time[key] = first
        return self._by_time[key]

    def _in_memory(self, replicas: int, behind: int) -> Ints:
        key = replicas, behind
        if key not in self._by_memory:
            waiting = self._memory.waiting_on(replicas, behind)
            held = self._memory.kept(self._states.parameters, self._states.activations, waiting)
            self._by_memory[key] = _first(held, self._memory.limit * _ROUNDING)
        return self._by_memory[key]


def _first(values: Floats, allowed: float) -> Ints:
    """By state as the end, the first one from which the values, which grow, do not grow by more than is allowed."""
    return np.searchsorted(values, values - allowed, side="left")
