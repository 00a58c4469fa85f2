"""PipeDream's asynchronous schedules: 1F1B without a flush, which updates weights while micro-batches are in flight."""

from dataclasses import replace

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.registry import register_schedule
from lp_pipe.pipeline.schedule.updates import Updates, turns


@register_schedule("pipedream", fixed_chunks=True)
def pipedream(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order 1F1B with weight stashing: an update after every micro-batch, with the weights that its forward had.

    The actions are those of one step that begins and ends empty, which are 1F1B's; between steps that follow each other
    (`PipelineClient.steps`) the pipeline stays full. Stage s of p uses weights that are p - 1 - s updates old, and
    keeps p - s versions of them.
    Source: PipeDream (Narayanan et al., SOSP 2019), section 3.3.
    """
    return _one_step("pipedream", stages, microbatches, Updates())


@register_schedule("pipedream_2bw", fixed_chunks=True)
def pipedream_2bw(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order 1F1B with double-buffered weights: an update after every `stages` micro-batches, one update late.

    All stages use weights that are one update old. A step's last group is smaller where `stages` does not divide its
    micro-batches.
    Source: Memory-Efficient Pipeline-Parallel DNN Training (Narayanan et al., ICML 2021), section 3.1.
    """
    return _one_step("pipedream_2bw", stages, microbatches, Updates(coalesced=True))


def vertical_sync(schedule: Schedule) -> Schedule:
    """Return the asynchronous schedule with weights of the same age on all stages for a micro-batch.

    Raises:
        ScheduleError: it is not asynchronous.
    """
    if schedule.updates is None:
        raise ScheduleError(
            f"schedule {schedule.name!r}: vertical sync is for asynchronous schedules, such as 'pipedream'"
        )
    return replace(schedule, updates=replace(schedule.updates, vertical_sync=True))


def _one_step(name: str, stages: int, microbatches: int, updates: Updates) -> Schedule:
    """Return one step that begins and ends empty."""
    workers = [
        [Action(op, stage, j) for op, j, _, _ in turns(timing, 0, 1, microbatches) if op != "U"]
        for stage, timing in enumerate(updates.timings([1] * stages))
    ]
    return Schedule(name, tuple(map(tuple, workers)), updates)
