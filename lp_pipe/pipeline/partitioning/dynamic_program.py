"""The exact dynamic program: cuts x replicas x nested levels, for the smallest slowest stage.

On a level with D devices (or groups of them), from the last layer backwards:

    rest[s, e, d] = min over t, r of max(stage s..t with r replicas, its two sides of the boundaries, rest[t, e, d - r])

for every end e, since the level above plans its stages with what this level takes for s..e on all its D devices. Where
memory is limited there is one such table for each number of devices that are used: of all levels, since what a replica
holds depends on how many devices work behind it.

Source: PipeDream (Narayanan et al., SOSP 2019), section 3.1; here with both sides of a boundary, and idle devices.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lp_pipe.pipeline.partitioning.cost import (
    CostModel,
    Index,
    Memory,
    Values,
    Waiting,
    bytes_on_device,
    seconds_on_device,
)
from lp_pipe.pipeline.partitioning.states import Floats, States
from lp_pipe.pipeline.partitioning.topology import Level

_PAIRS = 20_000  # of an end and a number of replicas, computed at once: so many stay in the cache
_ROUNDING = 1e-6
_ANY = 0  # the number of devices where it does not matter


OnADevice = Callable[[States, Memory | None, Waiting], Floats]  # by [start, end] of a stage that holds so much


class NestedStage(NamedTuple):
    """A stage of one level, from state `start` to `end`; the level below plans it inside."""

    start: int
    end: int
    replicas: int
    inside: "list[NestedStage]"


class _LevelTable(NamedTuple):
    """Seconds by [start, end, devices]: of whole stretches, and of those that begin behind a boundary of this level."""

    whole: Floats
    rest: Floats


class _Subproblem(NamedTuple):
    """The key of tables: for `depth` levels and at most so many replicas.

    behind, own: where memory is limited, of one of the replicas that the levels above make of these levels: the devices
    behind it, for each replica and rounded up, and its micro-batches of a step. Both are 0 where that does not matter.
    """

    depth: int
    replicas: int
    behind: int
    own: int


class DynamicProgram:
    """A search, with all its tables.

    max_replicas: of a stage, over all levels. upper: seconds of a plan that is known; slower ones are left out.
    on_a_device: what the search minimises, of a stage on a device; default: its seconds.
    """

    def __init__(
        self,
        states: States,
        levels: tuple[Level, ...],
        model: CostModel,
        max_replicas: int,
        memory: Memory | None = None,
        upper: float = np.inf,
        on_a_device: OnADevice | None = None,
    ) -> None:
        self._states = states
        self._levels = levels
        self._model = model
        self._memory = memory
        self._upper = upper
        self._on_a_device = on_a_device if on_a_device is not None else device_seconds
        self._devices = [int(np.prod([level.count for level in levels[:depth]])) for depth in range(len(levels) + 1)]
        self._tables: dict[_Subproblem, dict[int, _LevelTable]] = {}
        self._bottom: dict[Waiting, Floats] = {}
        # What a group computes in the time of the known plan; at least the smallest float, where no layer takes time.
        of_group = max(upper * self._devices[-2], np.finfo(np.float64).tiny)
        self._least_groups = np.ceil((states.compute[-1] - states.compute) / of_group - _ROUNDING).astype(int)
        self._least_groups_before = np.ceil(states.compute / of_group - _ROUNDING).astype(int)
        self._top = self._place(len(levels), max_replicas, 0, memory.microbatches if memory is not None else 0)

    def seconds(self) -> float:
        """Return the seconds of the slowest stage or boundary of the best plan, or inf."""
        return min(float(table.whole[0, 0, -1]) for table in self._solved(self._top).values())

    def parts(self) -> list[NestedStage]:
        """Return the best plan, with as few groups of the outermost level as that takes."""
        tables = self._solved(self._top)
        used = min(tables, key=lambda count: float(tables[count].whole[0, 0, -1]))
        return self._traced(self._top, used, 0, self._states.count - 1)

    def _place(self, depth: int, replicas: int, behind: int, own: int) -> _Subproblem:
        replicas = min(replicas, self._devices[depth])
        if self._memory is None:
            return _Subproblem(depth, replicas, 0, 0)
        return _Subproblem(depth, replicas, *self._memory.alike(behind, own, self._devices[depth]))

    def _below(self, place: _Subproblem, replicas: int, behind: int) -> _Subproblem:
        """Return the subproblem inside of a stage with so many replicas on this level.

        behind: devices behind the stage on this level. To round up level by level is the same as to divide by all
        replicas and round up once.
        """
        behind = -(-(place.behind + behind) // replicas)
        return self._place(place.depth - 1, place.replicas // replicas, behind, -(-place.own // replicas))

    def _count(self, place: _Subproblem) -> int:
        return self._levels[place.depth - 1].count

    def _left(self, place: _Subproblem, groups: int, replicas: int) -> int:
        """Return which column of the tables is for as many groups less; negative: there are too few.

        Where groups are devices and memory is limited, tables have one column: that of the devices that are used.
        """
        return 0 if self._memory is not None and place.depth == 1 else groups - replicas

    def _solved(self, place: _Subproblem) -> dict[int, _LevelTable]:
        """Return the tables by number of devices used, solved if need be."""
        if place in self._tables:
            return self._tables[place]
        n, devices = self._states.count, self._count(place)
        ends = 1 if place == self._top else n
        tables = self._tables[place] = {}
        most = min(self._devices[place.depth], (n - 1) * place.replicas)
        for used in [_ANY] if self._memory is None else range(1, most + 1):
            shape = (n, ends, self._left(place, devices, 0) + 1)
            tables[used] = _LevelTable(np.full(shape, np.inf), np.full(shape, np.inf))
            options = list(self._options(place, used))
            for start in reversed(range(n - 1)):
                if place == self._top and used == _ANY and self._upper < np.inf:
                    self._fill_window(place, start, [inside for _, _, inside in options])
                    continue
                for first, replicas, inside in options:
                    self._fill(place, used, start, first, replicas, inside)
        return tables

    def _options(self, place: _Subproblem, used: int) -> Iterator[tuple[int, int, Floats]]:
        """Yield devices, replicas and seconds inside of the first stage of this level.

        used: devices of that stage and of what is behind it on this level.
        """
        for replicas in range(1, min(self._count(place), place.replicas) + 1):
            for first in [_ANY] if used == _ANY else range(replicas, used + 1, replicas):
                inside = self._inside(self._below(place, replicas, used - first))
                if first // replicas in inside:
                    yield first, replicas, inside[first // replicas]

    def _inside(self, place: _Subproblem) -> dict[int, Floats]:
        """Return the seconds by [start, end] of a stage on all devices below, by number of devices used."""
        if place.depth == 0:
            return self._leaves(place)
        return {used: table.whole[:, :, -1] for used, table in self._solved(place).items()}

    def _leaves(self, place: _Subproblem) -> dict[int, Floats]:
        waiting = self._memory.waiting(place.behind, place.own) if self._memory is not None else Waiting(0, 0)
        if waiting not in self._bottom:
            self._bottom[waiting] = self._on_a_device(self._states, self._memory, waiting)
        return {_ANY if self._memory is None else 1: self._bottom[waiting]}

    def _fill(self, place: _Subproblem, used: int, start: int, first: int, replicas: int, inside: Floats) -> None:
        """Offer all stages that begin at `start`, with so many devices and replicas, to the tables."""
        stage, leaving, entering = self._costs(place, start, replicas, inside)
        table, left = self._tables[place][used], self._left(place, self._count(place), replicas)
        ends = slice(None) if place == self._top else slice(start + 1, None)
        found = np.full((table.whole[start, ends].shape[0], left + 1), np.inf)
        if used == _ANY or first < used:
            behind = self._tables[place][used - first].rest[start + 1 :, ends, : left + 1]
            found = np.maximum(behind, leaving[:, None, None]).min(axis=0)
        if first == used:  # the stage may be the only one
            alone = stage[-1:] if place == self._top else stage
            found = np.minimum(found, alone[:, None])
        whole, rest = table.whole[start, ends, -left - 1 :], table.rest[start, ends, -left - 1 :]
        np.minimum(whole, found, out=whole)
        np.minimum(rest, np.maximum(found, entering), out=rest)

    def _fill_window(self, place: _Subproblem, start: int, insides: list[Floats]) -> None:
        """Offer stages of the outermost level, with all replicas at once, if they may beat the known plan.

        Behind `start` are at least so many devices as its compute needs in that time, and before it, too.
        """
        table, devices = self._tables[place][_ANY], self._count(place)
        table.rest[-1] = 0
        least = self._least_groups
        counts = np.arange(least[start], devices - self._least_groups_before[start] + 1)
        if not len(counts):
            return
        replicas = np.arange(1, len(insides) + 1)[:, None]
        _, leaving, entering = self._costs(place, start, replicas, insides)
        fits = (leaving <= self._upper) & (replicas + least[None, start + 1 :] <= counts[-1])
        used, ends = np.nonzero(fits)
        for some in range(0, len(used), _PAIRS):
            r, t = used[some : some + _PAIRS, None] + 1, ends[some : some + _PAIRS, None] + start + 1
            left = counts[None, :] - r
            behind = np.where(left >= 0, table.rest[t, 0, np.maximum(left, 0)], np.inf)
            found = np.maximum(behind, leaving[r - 1, t - start - 1])
            table.whole[start, 0, counts] = np.minimum(table.whole[start, 0, counts], found.min(axis=0))
            found = np.maximum(found, entering[r[:, 0] - 1])
            table.rest[start, 0, counts] = np.minimum(table.rest[start, 0, counts], found.min(axis=0))

    def _costs(
        self, place: _Subproblem, start: int, replicas: Values, inside: Floats | list[Floats]
    ) -> tuple[Floats, Floats, Values]:
        """Return the seconds of stages that begin at `start`, and of the boundary before it.

        By each later state as the end: the stage alone, and with the boundary behind it. With a column of numbers of
        replicas, and what a stage takes inside for each, all have a row for each number.
        """
        states, level = self._states, self._levels[place.depth - 1]
        parameters = states.parameters[start + 1 :] - states.parameters[start]
        compute = (
            [each[start, start + 1 :] for each in inside] if isinstance(inside, list) else inside[start, start + 1 :]
        )
        stage: Floats = self._model.stage(np.asarray(compute), parameters, replicas, level)
        leaving = np.maximum(stage, self._model.boundary(states.crossing[start + 1 :], replicas, level))
        return stage, leaving, self._model.boundary(states.crossing[start], replicas, level)

    def _traced(self, place: _Subproblem, used: int, start: int, end: int) -> list[NestedStage]:
        """Return the stages of a stretch, from the choices that made its number."""
        if place.depth == 0:
            return []
        column = 0 if place == self._top else end
        tables = self._tables[place]
        enough = float(tables[used].whole[start, column, -1])
        behind_boundary = False
        parts: list[NestedStage] = []
        while start != end:
            row = (tables[used].rest if behind_boundary else tables[used].whole)[start, column]
            groups = int(np.flatnonzero(row <= enough)[0])  # the fewest that are enough
            first, replicas, cut = self._choice(place, used, start, end, groups, enough, behind_boundary)
            below = self._below(place, replicas, used - first)
            inside = self._traced(below, first // replicas, start, cut) if below.depth else []
            parts.append(NestedStage(start, cut, replicas, inside))
            start, used, behind_boundary = cut, used - first, True
        return parts

    def _choice(
        self, place: _Subproblem, used: int, start: int, end: int, groups: int, enough: float, behind_boundary: bool
    ) -> tuple[int, int, int]:
        """Return devices, replicas and end of the first stage of a stretch."""
        column = 0 if place == self._top else end
        for first, replicas, inside in self._options(place, used):
            stage, leaving, entering = self._costs(place, start, replicas, inside)
            left = self._left(place, groups, replicas)
            if left < 0 or (behind_boundary and entering > enough):
                continue
            if first == used and stage[end - start - 1] <= enough:
                return first, replicas, end
            if used == _ANY or first < used:
                rest = self._tables[place][used - first].rest[start + 1 :, column, left]
                cuts = np.flatnonzero((leaving <= enough) & (rest <= enough))
                if len(cuts):
                    return first, replicas, start + 1 + int(cuts[-1])
        raise AssertionError("the table holds a number that none of its choices makes")


def device_seconds(states: States, memory: Memory | None, waiting: Waiting) -> Floats:
    """Return the seconds of a stage on a device that holds so much of it, by [start, end]; inf: it does not fit."""
    seconds: Floats = np.where(states.within, seconds_on_device(states, memory, *_all(states), waiting), np.inf)
    return seconds


def memory_needed(states: States, memory: Memory, waiting: Waiting) -> Floats:
    """Return the bytes of a device by [start, end] of its stage."""
    return bytes_on_device(states, memory, *_all(states), waiting)


def _all(states: States) -> tuple[Index, Index]:
    """Return all starts and ends, as a column and a row."""
    start, ends = np.ogrid[: states.count, : states.count]
    return start, ends
