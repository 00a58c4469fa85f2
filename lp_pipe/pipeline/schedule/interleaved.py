"""Schedule "interleaved", 1F1B with several virtual stages a worker, so that the bubble is smaller."""

from collections.abc import Iterable
from itertools import pairwise

from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.one_f_one_b import alternate
from lp_pipe.pipeline.schedule.registry import register_schedule


@register_schedule("interleaved", default_chunks=2)
def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order 1F1B over chunks virtual stages a worker, dealt out in turn: stage s is on worker s mod stages.

    Micro-batches go through a worker in rounds: all of a round through its first chunk, then through its second, ...

        worker 0 |0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3 |
        worker 1 |    1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3     |

    When stages divides microbatches the order is Megatron's, rounds of `stages` micro-batches. Otherwise the rounds are
    larger, as even as can be and the larger ones first (torch.distributed.pipelining's, where all have one size).
    Source: Narayanan et al., 2021 (Megatron-LM), section 2.2.

    Raises:
        ScheduleError: stages, microbatches or chunks is below 1.
    """
    rounds = cut_into_rounds(stages, microbatches)
    return Schedule("interleaved", tuple(_worker(worker, stages, chunks, rounds) for worker in range(stages)))


def cut_into_rounds(stages: int, microbatches: int) -> list[range]:
    """Cut the micro-batches into rounds of at least `stages`, if there are that many.

    In a smaller round a worker would wait for its own chunk's output to come around; after a smaller round, a larger
    one's backwards would come before their forwards.
    """
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    ends = [size * index + min(index, larger) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def _worker(worker: int, stages: int, chunks: int, rounds: list[range]) -> tuple[Action, ...]:
    own = range(worker, stages * chunks, stages)
    forwards = [Action("F", stage, microbatch) for stage, microbatch in _round_by_round(own, rounds)]
    backwards = [Action("B", stage, microbatch) for stage, microbatch in _round_by_round(own[::-1], rounds)]
    # The last worker's first backward needs its last chunk's first forward; every hop towards worker 0 adds a way there
    # and back.
    warmup = (chunks - 1) * len(rounds[0]) + 2 * (stages - 1 - worker)
    return alternate(forwards, backwards, warmup)


def _round_by_round(own: range, rounds: list[range]) -> Iterable[tuple[int, int]]:
    return ((stage, microbatch) for members in rounds for stage in own for microbatch in members)
