"""Schedule "gpipe": all forwards, then all backwards."""

from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.registry import register_schedule


@register_schedule("gpipe", fixed_chunks=True)
def gpipe(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order all forwards before all backwards, so that the bubble is (p - 1) / (m + p - 1).

        worker 0 |F0 F1 F2 F3             B0 B1 B2 B3 |
        worker 1 |   F0 F1 F2 F3       B0 B1 B2 B3    |
        worker 2 |      F0 F1 F2 F3 B0 B1 B2 B3       |

    Every stage stashes all micro-batches. Backwards run in index order, not reversed as in the paper's figure: the
    time is the same, and gradients accumulate as in a plain loop.
    Source: GPipe (Huang et al., 2019), section 2.3.

    Raises:
        ScheduleError: stages or microbatches is below 1, or chunks is not 1.
    """
    return Schedule("gpipe", tuple(_worker(stage, microbatches) for stage in range(stages)))


def _worker(stage: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action("F", stage, microbatch) for microbatch in range(microbatches)]
    backwards = [Action("B", stage, microbatch) for microbatch in range(microbatches)]
    return (*forwards, *backwards)
