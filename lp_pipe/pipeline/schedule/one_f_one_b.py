"""Schedule "1f1b": one forward, one backward, so that few activations wait."""

from collections.abc import Sequence
from itertools import chain

from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.registry import register_schedule


@register_schedule("1f1b", fixed_chunks=True)
def one_f_one_b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order the forwards and backwards of every stage, non-interleaved 1F1B.

        worker 0 |F0 F1 F2       B0 F3 B1    B2    B3 |  warmup 2
        worker 1 |   F0 F1    B0 F2 B1 F3 B2    B3    |  warmup 1
        worker 2 |      F0 B0 F1 B1 F2 B2 F3 B3       |  warmup 0

    Stage s stashes at most stages - s activations (GPipe: microbatches).
    Source: PipeDream-Flush (Narayanan et al., 2021): 1F1B with a flush per mini-batch.

    Raises:
        ScheduleError: stages or microbatches is below 1, or chunks is not 1.
    """
    return Schedule("1f1b", tuple(_worker(stages, stage, microbatches) for stage in range(stages)))


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """Run `warmup` forwards, then a forward and a backward in turn (steady), then the other backwards (cooldown)."""
    steady = forwards[warmup:]
    pairs = chain.from_iterable(zip(steady, backwards, strict=False))
    return (*forwards[:warmup], *pairs, *backwards[len(steady) :])


def _worker(stages: int, stage: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action("F", stage, microbatch) for microbatch in range(microbatches)]
    backwards = [Action("B", stage, microbatch) for microbatch in range(microbatches)]
    return alternate(forwards, backwards, warmup=stages - 1 - stage)
