"""Schedule "forward", which has no backwards: for evaluation and inference."""

from collections.abc import Sequence

from lp_pipe.pipeline.schedule.interleaved import cut_into_rounds
from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.registry import register_schedule


@register_schedule("forward")
def forward(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order the forwards alone, stage s on worker s mod stages, as "interleaved" orders them.

        worker 0 |0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3     |
        worker 1 |    1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3 |

    Raises:
        ScheduleError: stages, microbatches or chunks is below 1.
    """
    return forward_on([stage % stages for stage in range(stages * chunks)], microbatches)


def forward_on(placement: Sequence[int], microbatches: int) -> Schedule:
    """Order the forwards for stages that already have their workers, such as those of another schedule.

    At every tick each worker runs what is ready: the earliest round of micro-batches first, in it the earliest stage.
    Rounds keep the number of messages that wait on an edge small, however many micro-batches there are. Where a worker
    has more to do than those before it, rounds do not hold these back; no stage gets further ahead of the next one than
    `most_ahead`.
    """
    own = [_stages_of(placement, worker) for worker in range(max(placement) + 1)]
    round_of = [index for index, members in enumerate(cut_into_rounds(len(own), microbatches)) for _ in members]
    workers: list[list[Action]] = [[] for _ in own]
    done = [0] * len(placement)
    limit = most_ahead(len(own))
    while done[-1] < microbatches:
        # When the tick starts: stage s may run what stage s - 1 has done, and must wait for stage s + 1.
        before, behind = (microbatches, *done), (*done[1:], microbatches)
        for actions, stages in zip(workers, own, strict=True):
            ready = [
                (round_of[done[stage]], stage)
                for stage in stages
                if done[stage] < before[stage] and done[stage] - behind[stage] < limit
            ]
            if ready:
                _, stage = min(ready)
                actions.append(Action("F", stage, done[stage]))
                done[stage] += 1
    return Schedule("forward", tuple(tuple(actions) for actions in workers))


def most_ahead(workers: int) -> int:
    """Return by how many micro-batches a stage gets ahead of the next one at most: so many credits are enough."""
    return 2 * workers


def _stages_of(placement: Sequence[int], worker: int) -> list[int]:
    return [stage for stage, owner in enumerate(placement) if owner == worker]
