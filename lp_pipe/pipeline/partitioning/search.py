"""The exact dynamic program: cuts x replicas x nested levels, for the smallest slowest stage.

On a level with D devices (or groups of them), from the last layer backwards:

    rest[s, e, d] = min over t, r of max(stage s..t with r replicas, its two sides of the boundaries, rest[t, e, d - r])

for every end e, since the level above plans its stages with what this level takes for s..e on all its D devices. Where
memory is limited there is one such table for each number of stages: what a stage stashes depends on how many follow it.

Source: PipeDream (Narayanan et al., SOSP 2019), section 3.1; here with both sides of a boundary, and idle devices.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lp_pipe.pipeline.partitioning.cost import CostModel, Memory, Values
from lp_pipe.pipeline.partitioning.states import Floats, States
from lp_pipe.pipeline.partitioning.topology import Level

_PAIRS = 20_000  # of an end and a number of replicas, at once: what the cache holds
_ROUNDING = 1e-6
_ANY = 0  # in place of a number of stages, where that does not matter


class Part(NamedTuple):
    """A stage of one level, from state `start` to `end`, and how it is planned inside by the level below."""

    start: int
    end: int
    replicas: int
    inside: "list[Part]"


class _Table(NamedTuple):
    """Seconds by [start, end, devices]: of whole stretches, and of those that begin behind a boundary of this level."""

    whole: Floats
    rest: Floats


class _Place(NamedTuple):
    """Which tables: of how many levels, of at most so many replicas, with so many stages behind (0 where no matter)."""

    depth: int
    replicas: int
    behind: int


class Search:
    """One search, with all its tables.

    max_replicas: of a stage, over all levels. upper: seconds that a plan is known for; slower ones are left out.
    """

    def __init__(
        self,
        states: States,
        levels: tuple[Level, ...],
        model: CostModel,
        max_replicas: int,
        memory: Memory | None = None,
        upper: float = np.inf,
    ) -> None:
        self._states = states
        self._levels = levels
        self._model = model
        self._memory = memory
        self._upper = upper
        self._devices = [int(np.prod([level.count for level in levels[:depth]])) for depth in range(len(levels) + 1)]
        self._tables: dict[_Place, dict[int, _Table]] = {}
        self._bottom: dict[int, dict[int, Floats]] = {}
        # What a group computes in the time that a plan is known for; 0 where no layer takes any.
        of_group = max(upper * self._devices[-2], np.finfo(np.float64).tiny)
        self._least_groups = np.ceil((states.compute[-1] - states.compute) / of_group - _ROUNDING).astype(int)
        self._least_groups_before = np.ceil(states.compute / of_group - _ROUNDING).astype(int)
        self._top = self._place(len(levels), max_replicas, 0)

    def seconds(self) -> list[float]:
        """The slowest stage or boundary of the best plan on at most 1, 2, … groups of the outermost level; or inf."""
        tables = self._solved(self._top).values()
        return [
            float(min(table.whole[0, 0, count] for table in tables)) for count in range(1, self._count(self._top) + 1)
        ]

    def parts(self, groups: int) -> list[Part]:
        """The best plan on at most so many groups of the outermost level, with as few of them as that takes."""
        tables = self._solved(self._top)
        stages = min(tables, key=lambda count: float(tables[count].whole[0, 0, groups]))
        return self._traced(self._top, stages, 0, self._states.count - 1, groups)

    def _place(self, depth: int, replicas: int, behind: int) -> _Place:
        return _Place(depth, min(replicas, self._devices[depth]), behind)

    def _count(self, place: _Place) -> int:
        return self._levels[place.depth - 1].count

    def _solved(self, place: _Place) -> dict[int, _Table]:
        """The tables by number of stages."""
        if place in self._tables:
            return self._tables[place]
        n, devices = self._states.count, self._count(place)
        ends = 1 if place == self._top else n
        tables = self._tables[place] = {}
        most = min(self._devices[place.depth], n - 1)
        for stages in [_ANY] if self._memory is None else range(1, most + 1):
            shape = (n, ends, devices + 1)
            tables[stages] = _Table(np.full(shape, np.inf), np.full(shape, np.inf))
            options = list(self._options(place, stages))
            for start in reversed(range(n - 1)):
                if place == self._top and stages == _ANY and self._upper < np.inf:
                    self._fill_window(place, start, [inside for _, _, inside in options])
                    continue
                for first, replicas, inside in options:
                    self._fill(place, stages, start, first, replicas, inside)
        return tables

    def _options(self, place: _Place, stages: int) -> Iterator[tuple[int, int, Floats]]:
        """For the first stage of this level: its own stages, its replicas, and what it takes inside."""
        for replicas in range(1, min(self._count(place), place.replicas) + 1):
            for first in [_ANY] if stages == _ANY else range(1, stages + 1):
                below = self._place(place.depth - 1, place.replicas // replicas, place.behind + stages - first)
                inside = self._inside(below)
                if first in inside:
                    yield first, replicas, inside[first]

    def _inside(self, place: _Place) -> dict[int, Floats]:
        """Seconds by [start, end], by number of stages, that a stage takes on all devices of the levels below."""
        if place.depth == 0:
            return self._on_a_device(place.behind)
        return {stages: table.whole[:, :, -1] for stages, table in self._solved(place).items()}

    def _on_a_device(self, behind: int) -> dict[int, Floats]:
        if behind not in self._bottom:
            stages = _ANY if self._memory is None else 1
            self._bottom[behind] = {stages: device_seconds(self._states, self._memory, behind)}
        return self._bottom[behind]

    def _fill(self, place: _Place, stages: int, start: int, first: int, replicas: int, inside: Floats) -> None:
        """Offer all stages that begin at `start`, with so many replicas, to the tables."""
        stage, leaving, entering = self._costs(place, start, replicas, inside)
        table, devices = self._tables[place][stages], self._count(place)
        ends = slice(None) if place == self._top else slice(start + 1, None)
        found = np.full((table.whole[start, ends].shape[0], devices - replicas + 1), np.inf)
        if stages == _ANY or first < stages:
            behind = self._tables[place][stages - first].rest[start + 1 :, ends, : devices - replicas + 1]
            found = np.maximum(behind, leaving[:, None, None]).min(axis=0)
        if first == stages:  # it may be the only one
            alone = stage[-1:] if place == self._top else stage
            found = np.minimum(found, alone[:, None])
        whole, rest = table.whole[start, ends, replicas:], table.rest[start, ends, replicas:]
        np.minimum(whole, found, out=whole)
        np.minimum(rest, np.maximum(found, entering), out=rest)

    def _fill_window(self, place: _Place, start: int, insides: list[Floats]) -> None:
        """As `_fill`, of the outermost level and all replicas at once, but only what may beat the plan that is known.

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
        self, place: _Place, start: int, replicas: Values, inside: Floats | list[Floats]
    ) -> tuple[Floats, Floats, Values]:
        """By each later state as the end: the stage alone, with the boundary behind it; and the boundary before it.

        With a column of numbers of replicas, and what a stage takes inside for each, all have a row for each.
        """
        states, level = self._states, self._levels[place.depth - 1]
        parameters = states.parameters[start + 1 :] - states.parameters[start]
        compute = (
            [each[start, start + 1 :] for each in inside] if isinstance(inside, list) else inside[start, start + 1 :]
        )
        stage: Floats = self._model.stage(np.asarray(compute), parameters, replicas, level)
        leaving = np.maximum(stage, self._model.boundary(states.crossing[start + 1 :], replicas, level))
        return stage, leaving, self._model.boundary(states.crossing[start], replicas, level)

    def _traced(self, place: _Place, stages: int, start: int, end: int, devices: int) -> list[Part]:
        """The stages of a stretch: again the choices that made its number."""
        if place.depth == 0:
            return []
        column = 0 if place == self._top else end
        tables = self._tables[place]
        enough = float(tables[stages].whole[start, column, devices])
        behind_boundary = False
        parts: list[Part] = []
        while start != end:
            row = (tables[stages].rest if behind_boundary else tables[stages].whole)[start, column]
            devices = int(np.flatnonzero(row <= enough)[0])  # as few as do
            first, replicas, cut = self._choice(place, stages, start, end, devices, enough, behind_boundary)
            below = self._place(place.depth - 1, place.replicas // replicas, place.behind + stages - first)
            inside = self._traced(below, first, start, cut, self._count(below)) if below.depth else []
            parts.append(Part(start, cut, replicas, inside))
            start, stages, devices, behind_boundary = cut, stages - first, devices - replicas, True
        return parts

    def _choice(
        self, place: _Place, stages: int, start: int, end: int, devices: int, enough: float, behind_boundary: bool
    ) -> tuple[int, int, int]:
        """Of the first stage of a stretch: its own stages, its replicas and its end."""
        column = 0 if place == self._top else end
        for first, replicas, inside in self._options(place, stages):
            stage, leaving, entering = self._costs(place, start, replicas, inside)
            if replicas > devices or (behind_boundary and entering > enough):
                continue
            if first == stages and stage[end - start - 1] <= enough:
                return first, replicas, end
            if stages == _ANY or first < stages:
                rest = self._tables[place][stages - first].rest[start + 1 :, column, devices - replicas]
                cuts = np.flatnonzero((leaving <= enough) & (rest <= enough))
                if len(cuts):
                    return first, replicas, start + 1 + int(cuts[-1])
        raise AssertionError("the table holds a number that none of its choices makes")


def device_seconds(states: States, memory: Memory | None, behind: int) -> Floats:
    """By [start, end] of a stage what it takes on a device, with so many stages behind it; inf: it does not fit."""
    seconds: Floats = np.where(states.within, _differences(states.compute), np.inf)
    if memory is None:
        return seconds
    if memory.recompute == "auto":
        does_fit = _kept(states, memory, behind + 1) <= memory.limit
        seconds = seconds + np.where(does_fit, 0.0, _differences(states.forward))
    return np.where(memory_needed(states, memory, behind + 1) <= memory.limit, seconds, np.inf)


def memory_needed(states: States, memory: Memory, stages_from_here: int) -> Floats:
    """Bytes of a device by [start, end] of its stage."""
    parameters, activations = _differences(states.parameters), _differences(states.activations)
    needed: Floats = memory.needed(parameters, activations, states.crossing[:, None], stages_from_here)
    return needed


def _kept(states: States, memory: Memory, stages_from_here: int) -> Floats:
    """Bytes of a device by [start, end] of its stage, if nothing is recomputed."""
    kept: Floats = memory.kept(_differences(states.parameters), _differences(states.activations), stages_from_here)
    return kept


def _differences(values: Floats) -> Floats:
    """By [start, end]; none is negative, though sums of numbers that are not exact may be."""
    return np.maximum(values[None, :] - values[:, None], 0)
