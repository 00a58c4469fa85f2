"""Schedule "looped_bfs": several virtual stages a worker, each run over all micro-batches before the next."""

from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.registry import register_schedule


@register_schedule("looped_bfs", default_chunks=2)
def looped_bfs(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order all forwards of a worker's first virtual stage, then of its second, ..., then the backwards likewise.

        worker 0 |0F0 0F1 0F2 2F0 2F1 2F2         2B0 2B1 2B2 0B0 0B1 0B2 |
        worker 1 |    1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2     |

    Stage s is on worker s mod stages. A worker stashes everything; what it buys over "interleaved" is that a stage's
    gradients are ready early, to be reduced during the other stages' backwards.
    Backwards run in index order, not reversed as in torch: the time is the same, and gradients accumulate as in a
    plain loop.
    Source: Breadth-First Pipeline Parallelism (Lamy-Poirier, 2022).

    Raises:
        ScheduleError: stages, microbatches or chunks is below 1.
    """
    own = [range(worker, stages * chunks, stages) for worker in range(stages)]
    return Schedule("looped_bfs", tuple(_worker(stage_indices, microbatches) for stage_indices in own))


def _worker(own: range, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action("F", stage, microbatch) for stage in own for microbatch in range(microbatches)]
    backwards = [Action("B", stage, microbatch) for stage in reversed(own) for microbatch in range(microbatches)]
    return (*forwards, *backwards)
