"""What schedules with two stages a worker in a V have in common.

    stage       0  1  2
                5  4  3
    worker      0  1  2

The last stage is on worker 0, so that its backwards start where micro-batches came in, and loss and batch are together.
"""

from collections import Counter
from collections.abc import Iterable

from lp_pipe.pipeline.schedule.ir import Action, Op

Step = tuple[Op, int]  # an action whose micro-batch follows from its place: (op, stage)


def legs(stages: int, worker: int) -> tuple[int, int]:
    """A worker's stage on the way down the V and the one on the way up."""
    return worker, 2 * stages - 1 - worker


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
