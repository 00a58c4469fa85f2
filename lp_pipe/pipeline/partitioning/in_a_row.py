"""A fast plan of a chain on nested levels; not always the best, but of all cuts, and in a second.

Groups of devices stand in a row, and are taken from the last one on. A stage has devices of one innermost group, or
whole groups side by side:

    place     11 10 9 8 | 7 6 5 4 | 3 2 1 0        on groups of 4: b and c with 2 and 1 devices of one group, and one
    stage      a  a a a | a a a a | - b b c        idle, since a has whole groups: 8 replicas, 4 in each of 2 groups

Plans whose groups are replicas of a whole pipeline are not among them; `DynamicProgram` has those. As in
`min_devices`, for each time that is asked for the fewest places are kept from each state on, and of as many the fewest
devices. That is not always best: links differ, and devices may be idle.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from lp_pipe.pipeline.partitioning.cost import CostModel, Memory, between, seconds_on_device
from lp_pipe.pipeline.partitioning.dynamic_program import NestedStage
from lp_pipe.pipeline.partitioning.min_devices import Ints
from lp_pipe.pipeline.partitioning.states import Bools, Floats, States
from lp_pipe.pipeline.partitioning.topology import Level


class InARow:
    """One search. The stages that it finds are between all states, each of which is within the next."""

    def __init__(
        self, states: States, levels: Sequence[Level], model: CostModel, memory: Memory, max_replicas: int
    ) -> None:
        self._states = states
        self._levels = levels
        self._model = model
        self._memory = memory
        self._choices = _Choices(levels, max_replicas)

    def within(self, limit: float) -> list[NestedStage]:
        """One that takes no more seconds than that, if one is found."""
        sweep = _Sweep(self._states, self._levels, self._model, self._memory, self._choices, limit)
        return _nested(sweep.stages(), self._choices, len(self._levels) - 1)


class _Choices:
    """All ways to take devices for a stage, by the places that are taken behind it: arrays with a number for each way.

    by_level: replicas on each level. after: places taken with it. closed: where the next group starts. is_first: 1
    where nothing is taken of its innermost group. boundaries: behind it, before it at `closed`, and before it within
    the group: of which level's links they are, and how many replicas on that level share them.
    """

    def __init__(self, levels: Sequence[Level], max_replicas: int) -> None:
        self.sizes = [prod(level.count for level in levels[:depth]) for depth in range(len(levels) + 1)]
        ways = []
        for depth, level in enumerate(levels):
            inside, outside = [inner.count for inner in levels[:depth]], [1] * (len(levels) - depth - 1)
            for groups in range(min(depth, 1) + 1, level.count + 1):
                replicas = [*inside, groups, *outside]
                if prod(replicas) <= max_replicas:
                    ways += [(depth, behind, *replicas) for behind in self._starts(depth, groups)]
        depth_, self.behind, *self.by_level = np.array(ways).T
        self.replicas: Ints = prod(self.by_level)
        self.after: Ints = self.behind + self.replicas
        self.closed: Ints = -(-self.after // self.sizes[1]) * self.sizes[1]
        self.is_first: Ints = (self.behind % self.sizes[1] == 0).astype(int)
        groups_ = np.choose(depth_, self.by_level)
        self.boundaries = [
            (parting, np.where(parting == depth_, groups_, 1))
            for parting in (self._parting(self.behind), self._parting(self.closed), 0 * depth_)
        ]

    def _starts(self, depth: int, groups: int) -> list[int]:
        """Behind which places so many groups of that level may be taken, which are of one group of the next level."""
        size, outer = self.sizes[depth], self.sizes[depth + 1]
        return [place for place in range(0, self.sizes[-1], size) if place % outer + groups * size <= outer]

    def _parting(self, places: Ints) -> Ints:
        """The level of the links between what is behind and before a place."""
        level: Ints = np.sum([places % size == 0 for size in self.sizes[1:-1]], axis=0, dtype=int)
        return level


class _Sweep:
    """From the last state backwards, with no stage or side of a boundary that takes longer than the limit.

    By kind and state: devices used from there on, the choice of the first stage, and its end. Kind 1: the stage before
    starts on another group; 0: it goes on within the group.
    """

    def __init__(
        self,
        states: States,
        levels: Sequence[Level],
        model: CostModel,
        memory: Memory,
        choices: _Choices,
        limit: float,
    ) -> None:
        self._states = states
        self._levels = levels
        self._model = model
        self._memory = memory
        self._choices = choices
        self._limit = limit
        self._used = np.zeros((2, states.count), dtype=int)
        self._chosen = np.full((2, states.count), -1)
        self._until = np.zeros((2, states.count), dtype=int)
        self._first = np.full(len(choices.behind), states.count)  # by choice: the first end of its stage
        self._crossing_behind, self._crossing_closed, self._crossing_within = self._most_crossing()
        self._is_full = choices.after == choices.closed
        self._enter(states.count - 1, 0)
        for start in reversed(range(states.count - 1)):
            self._fill(start)

    def _most_crossing(self) -> list[Floats]:
        """Bytes that may cross each choice's boundaries."""
        latency = np.array([level.latency for level in self._levels])
        bandwidth = np.array([level.bandwidth for level in self._levels])
        return [
            np.maximum(self._limit * shares - 2 * latency[parting], 0) * bandwidth[parting] / 2
            for parting, shares in self._choices.boundaries
        ]

    def _enter(self, state: int, place: int) -> None:
        """Stages may end there, with so many places taken behind them."""
        does_start = (self._choices.behind == place) & (self._states.crossing[state] <= self._crossing_behind)
        self._first[does_start] = state

    def _fill(self, start: int) -> None:
        choices, crossing = self._choices, self._states.crossing[start]
        some = np.flatnonzero(self._first < self._states.count)
        some = some[self._keeps(start, some)]
        used = self._used[choices.is_first[some], self._first[some]] + choices.replicas[some]
        within = ~self._is_full[some] & (crossing <= self._crossing_within[some])
        closed = crossing <= self._crossing_closed[some]
        entered = [
            self._choose(start, kind, some[which], used[which], places[some[which]])
            for kind, which, places in ((0, within, choices.after), (1, closed, choices.closed))
            if which.any()
        ]
        for place in entered:
            self._enter(start, place)

    def _keeps(self, start: int, some: Ints) -> Bools:
        """Whether stages with these choices keep to the limits."""
        states, memory, choices, ends = self._states, self._memory, self._choices, self._first[some]
        waiting = memory.waiting_on(choices.replicas[some], self._used[choices.is_first[some], ends])
        parameters = between(states.parameters, start, ends)
        seconds = seconds_on_device(states, memory, start, ends, waiting)
        for level, replicas in zip(self._levels, choices.by_level, strict=True):
            seconds = self._model.stage(seconds, parameters, replicas[some], level)
        keeps: Bools = seconds <= self._limit
        return keeps

    def _choose(self, start: int, kind: int, some: Ints, used: Ints, places: Ints) -> int:
        """The choice with the fewest places, and of those the fewest devices; its places."""
        best = int(np.lexsort((used, places))[0])
        self._used[kind, start], self._chosen[kind, start] = used[best], some[best]
        self._until[kind, start] = self._first[some[best]]
        return int(places[best])

    def stages(self) -> "list[_Chosen]":
        """From the first state on; empty if there is no plan."""
        found: list[_Chosen] = []
        state, kind = 0, 1
        while state != self._states.count - 1 and self._chosen[kind, state] >= 0:
            choice, end = int(self._chosen[kind, state]), int(self._until[kind, state])
            found.append((state, end, choice))
            state, kind = end, int(self._choices.is_first[choice])
        return found


_Chosen = tuple[int, int, int]  # a stage's start, end and choice


def _nested(stages: Sequence[_Chosen], choices: _Choices, depth: int) -> list[NestedStage]:
    """Stages on the same group of a level are one part there."""
    parts: list[NestedStage] = []
    while stages:
        start, _, choice = stages[0]
        shared = [s for s in stages if _group(s, choices, depth) == _group(stages[0], choices, depth)]
        inside = _nested(shared, choices, depth - 1) if depth else []
        parts.append(NestedStage(start, shared[-1][1], int(choices.by_level[depth][choice]), inside))
        stages = stages[len(shared) :]
    return parts


def _group(stage: _Chosen, choices: _Choices, depth: int) -> int:
    """The first place of the group of that level that a stage is on, or of the first of several."""
    return int(choices.behind[stage[2]] // choices.sizes[depth])
