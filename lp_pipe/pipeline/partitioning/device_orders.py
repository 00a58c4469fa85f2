"""Ways in which stages may take devices of different speeds: in the order given, or in any.

The replicas of a stage share its micro-batches equally, so the slowest of them sets its pace: a stage asks for so many
devices of at least some speed. A place says what is taken so far; places are numbered so that later ones have more.

    in the order given   how many devices lie behind: a stage takes the next ones, but for those that are too slow
    in any order         how many devices of each speed were asked for; of the k fastest speeds together there are no
                         more than that many devices, which is when all stages can have theirs (Hall, 1935)
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from math import prod
from typing import NamedTuple

import numpy as np

from lp_pipe.pipeline.partitioning.bounded_search import BoundedSearch, Kind, Step
from lp_pipe.pipeline.partitioning.cost import CostModel, Memory
from lp_pipe.pipeline.partitioning.min_devices import Ints
from lp_pipe.pipeline.partitioning.states import States
from lp_pipe.pipeline.partitioning.topology import Level

MOST_PLACES = 20_000  # some 50 devices of three speeds, nine of nine


class Allocation(NamedTuple):
    """A number of devices of at least this speed, for a stage; the pipeline is then at `next_place`."""

    replicas: int
    speed: float
    next_place: int


Allocations = list[list[Allocation]]  # by place, from the empty one


def allocations_in_given_order(speeds: Sequence[float], max_replicas: int) -> Allocations:
    """Return the allocations at each place p, where the first p devices lie behind."""
    return [
        [
            Allocation(replicas, speed, then)
            for replicas in range(1, min(max_replicas, len(speeds) - place) + 1)
            for speed, then in _windows(speeds, place, replicas)
        ]
        for place in range(len(speeds) + 1)
    ]


def allocations_in_any_order(speeds: Sequence[float], max_replicas: int) -> Allocations:
    """Return the allocations at each place, one for each way to ask for devices that there are enough of."""
    kinds, enough = sorted(set(speeds), reverse=True), _enough(speeds)
    asked = sorted(_asked(enough), key=sum)
    places = {counts: place for place, counts in enumerate(asked)}
    allocations: Allocations = []
    for counts in asked:
        more = [
            (replicas, kind, tuple(count + replicas * (k == index) for k, count in enumerate(counts)))
            for index, kind in enumerate(kinds)
            for replicas in range(1, min(max_replicas, enough[index] - sum(counts[: index + 1])) + 1)
        ]
        allocations.append(
            [Allocation(replicas, kind, places[then]) for replicas, kind, then in more if then in places]
        )
    return allocations


def kinds_searched(speeds: Sequence[float]) -> int:
    """Return of how many different speeds all orders can be searched: of all, but with many devices."""
    for kinds in range(len(set(speeds)), 1, -1):
        if _count(_enough(rounded(speeds, kinds)[0])) <= MOST_PLACES:
            return kinds
    return 1


def devices_in_given_order(speeds: Sequence[float], taken: Sequence[Allocation]) -> list[tuple[int, ...]]:
    """Return the devices of each stage: of those that it passes the fastest ones."""
    served = []
    place = 0
    for allocation in taken:
        fastest = sorted(range(place, allocation.next_place), key=lambda device: -speeds[device])[: allocation.replicas]
        served.append(tuple(sorted(fastest)))
        place = allocation.next_place
    return served


def devices_in_any_order(speeds: Sequence[float], taken: Sequence[Allocation]) -> list[tuple[int, ...]]:
    """Return the devices of each stage.

    Stages that ask for the fastest choose first, and take the slowest devices that are fast enough.
    """
    free = sorted(range(len(speeds)), key=lambda device: speeds[device])
    served: list[tuple[int, ...]] = [()] * len(taken)
    for stage, allocation in sorted(enumerate(taken), key=lambda item: -item[1].speed):
        chosen = [device for device in free if speeds[device] >= allocation.speed][: allocation.replicas]
        free = [device for device in free if device not in chosen]
        served[stage] = tuple(sorted(chosen))
    return served


def rounded(speeds: Sequence[float], kinds: int) -> tuple[list[float], list[float]]:
    """Return the speeds rounded down and up to so many kinds, with the smallest largest ratio of the two."""
    values = sorted(set(speeds))
    if len(values) <= kinds:
        return list(speeds), list(speeds)
    # by number of groups, then of the slowest values in them: the largest ratio, and where the last group starts
    best: list[dict[int, tuple[float, int]]] = [{0: (1.0, 0)}]
    for count in range(1, kinds + 1):
        best.append(
            {
                end: min(
                    (max(ratio, values[end - 1] / values[start]), start)
                    for start, (ratio, _) in best[-1].items()
                    if start < end
                )
                for end in range(count, len(values) + 1)
            }
        )
    groups: dict[float, tuple[float, float]] = {}
    end = len(values)
    for count in range(kinds, 0, -1):
        start = best[count][end][1]
        groups.update({value: (values[start], values[end - 1]) for value in values[start:end]})
        end = start
    return [groups[speed][0] for speed in speeds], [groups[speed][1] for speed in speeds]


def _enough(speeds: Sequence[float]) -> list[int]:
    """Return how many devices have one of the k fastest speeds, for each k."""
    return list(accumulate(list(speeds).count(kind) for kind in sorted(set(speeds), reverse=True)))


def _asked(enough: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all counts by kind, of which the first k together are never more than there are devices."""
    found: list[tuple[int, ...]] = [()]
    for most in enough:
        found = [(*counts, more) for counts in found for more in range(most - sum(counts) + 1)]
    return found


def _count(enough: Sequence[int]) -> int:
    """Return how many counts `_asked` would find."""
    ways = [1]  # by how many devices are taken
    for most in enough:
        ways = [sum(ways[: taken + 1]) for taken in range(most + 1)]
    return sum(ways)


def _windows(speeds: Sequence[float], place: int, replicas: int) -> list[tuple[float, int]]:
    """Return the speeds that so many of the next devices have, each with the first place behind them."""
    found: list[tuple[float, int]] = []
    for end in range(place + replicas, len(speeds) + 1):
        speed = sorted(speeds[place:end], reverse=True)[replicas - 1]
        if not found or speed > found[-1][0]:
            found.append((speed, end))
    return found


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
