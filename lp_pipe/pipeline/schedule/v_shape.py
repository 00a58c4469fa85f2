"""Parts that schedules with two stages a worker in a V have in common.

    stage       0  1  2
                5  4  3
    worker      0  1  2

The last stage is on worker 0, so that its backwards start where micro-batches came in, and loss and batch are together.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lp_pipe.pipeline.schedule.ir import Action, Op

Step = tuple[Op, int]  # (op, stage) of an action; its micro-batch follows from its place


@dataclass(frozen=True, slots=True)
class Leg:
    """A stage of a worker's two, and the steps that it has."""

    stage: int

    @property
    def forward(self) -> Step:
        return "F", self.stage

    @property
    def backward(self) -> Step:
        return "B", self.stage

    @property
    def inputs(self) -> Step:
        return "I", self.stage

    @property
    def weights(self) -> Step:
        return "W", self.stage


def legs(stages: int, worker: int) -> tuple[Leg, Leg]:
    """Return a worker's stage on the way down the V, and the one on the way up."""
    return Leg(worker), Leg(2 * stages - 1 - worker)


def numbered(steps: Iterable[Step], microbatches: int) -> tuple[Action, ...]:
    """Number the micro-batches of each stage's F, of its I and of its W in order; leaves out those that do not exist.

    A B is an I and a W in one.
    """
    counts: Counter[Step] = Counter()
    actions = []
    for op, stage in steps:
        kinds: tuple[Op, ...] = ("I", "W") if op == "B" else (op,)
        microbatch = counts[kinds[0], stage]
        counts.update((kind, stage) for kind in kinds)
        if microbatch < microbatches:
            actions.append(Action(op, stage, microbatch))
    return tuple(actions)
