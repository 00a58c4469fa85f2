"""Stages on nested levels in a row, as `BoundedSearch` goes through them.

Groups of devices stand in a row, and are taken from the last one on. A stage has devices of one innermost group, or
whole groups side by side. A place is a number of devices that are taken, or that stay idle:

    place     11 10 9 8 | 7 6 5 4 | 3 2 1 0        on groups of 4: b and c with 2 and 1 devices of one group, and one
    stage      a  a a a | a a a a | - b b c        idle, since a has whole groups: 8 replicas, 4 in each of 2 groups

Plans with groups that replicate a whole pipeline are not among these; `DynamicProgram` has them.
"""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from lp_pipe.pipeline.partitioning.bounded_search import BoundedSearch, ChainStage, Kind, Step
from lp_pipe.pipeline.partitioning.cost import CostModel, Memory
from lp_pipe.pipeline.partitioning.dynamic_program import NestedStage
from lp_pipe.pipeline.partitioning.min_devices import Ints
from lp_pipe.pipeline.partitioning.states import States
from lp_pipe.pipeline.partitioning.topology import Level


class NestedLevels:
    """A search of stages in a row on nested levels."""

    def __init__(
        self, states: States, levels: Sequence[Level], model: CostModel, memory: Memory | None, max_replicas: int
    ) -> None:
        self._row = _DevicesInARow(levels, max_replicas)
        self._search = BoundedSearch(states, levels, model, memory, self._row)

    def within(self, limit: float) -> list[NestedStage]:
        """Find stages that take no more seconds than that; empty where none are found."""
        return self._nested(self._search.within(limit), len(self._row.sizes) - 2)

    def _nested(self, stages: Sequence[ChainStage], depth: int) -> list[NestedStage]:
        """Join the stages on one group of a level: they are one stage of that level."""
        nested: list[NestedStage] = []
        size = self._row.sizes[depth]
        while stages:
            first = stages[0]
            shared = [stage for stage in stages if stage.source // size == first.source // size]
            inside = self._nested(shared, depth - 1) if depth else []
            nested.append(NestedStage(first.start, shared[-1].end, first.kind.replicas[depth], inside))
            stages = stages[len(shared) :]
        return nested


class _DevicesInARow:
    """The places in the row.

    sizes: devices of a group, by level.
    """

    def __init__(self, levels: Sequence[Level], max_replicas: int) -> None:
        self.sizes = [prod(level.count for level in levels[:depth]) for depth in range(len(levels) + 1)]
        self.count = self.sizes[-1]
        self.level_at: Ints = np.sum(
            [np.arange(self.count + 1) % size == 0 for size in self.sizes[1:-1]], axis=0, dtype=int
        )
        self.kinds: Sequence[Kind] = list(_kinds(levels, max_replicas))
        self.steps: Sequence[Step] = [self._step(place) for place in range(self.count)]

    def _step(self, place: int) -> Step:
        """Return all ways to take devices from that place on, which end within an innermost group, or at its end."""
        ways = [
            (place, target, number, self._shares(kind, depth, place), self._shares(kind, depth, target))
            for number, kind in enumerate(self.kinds)
            for depth in [_depth(kind)]
            if place % self.sizes[depth] == 0
            and place % self.sizes[depth + 1] + prod(kind.replicas) <= self.sizes[depth + 1]
            for after in [place + prod(kind.replicas)]
            for target in sorted({after, -(-after // self.sizes[1]) * self.sizes[1]})
        ]
        return Step(*np.array(ways, dtype=int).reshape(-1, 5).T)

    def _shares(self, kind: Kind, depth: int, place: int) -> int:
        """Return how many replicas share the link at a place."""
        return kind.replicas[depth] if self.level_at[place] == depth else 1


def _kinds(levels: Sequence[Level], max_replicas: int) -> Iterator[Kind]:
    for depth, level in enumerate(levels):
        inside, outside = [inner.count for inner in levels[:depth]], [1] * (len(levels) - depth - 1)
        for groups in range(min(depth, 1) + 1, level.count + 1):
            if prod(inside) * groups <= max_replicas:
                yield Kind((*inside, groups, *outside))


def _depth(kind: Kind) -> int:
    """Return the level on which a stage has groups side by side."""
    return max((depth for depth, replicas in enumerate(kind.replicas) if replicas > 1), default=0)
