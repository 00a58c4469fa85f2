"""The schedule that `add_pipeline` is asked for, made and proven."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from lp_pipe.errors import PipelineError, ScheduleError
from lp_pipe.pipeline.schedule import (
    Schedule,
    default_chunks,
    forward_on,
    names_file,
    nearest_name,
    replicated,
    verify,
)
from lp_pipe.pipeline.schedule.channels import ScheduleEdge
from lp_pipe.pipeline.schedule.forward import most_ahead
from lp_pipe.pipeline.schedule.numbers_given import is_count

DEFAULT_STAGES = 2
_CREDITS = 4


def chosen_schedule(
    schedule: str | Path | Schedule,
    stages: int | Sequence[int] | None,
    microbatches: int,
    chunks: int | None,
    replicas: int | Sequence[int],
) -> tuple[Schedule, str | None, tuple[int, ...]]:
    """The schedule, its name if it can be made again for another number of micro-batches, each worker's replicas.

    Raises:
        ScheduleError: it does not exist for these numbers, is for others, or cannot be read.
        PipelineError: it is no schedule, or the replicas or cut points do not fit it.
    """
    if isinstance(schedule, Schedule):
        made, name = schedule, None
    elif not isinstance(schedule, str | Path):
        name = nearest_name(schedule) or "1f1b"
        raise PipelineError(f"schedule={schedule!r}: give a name such as {name!r}, a Schedule, or the path of a CSV")
    elif names_file(schedule):
        made, name = Schedule.from_csv(Path(schedule)), None
    else:
        name, stages = str(schedule), DEFAULT_STAGES if stages is None else stages
        counts = _counts(replicas, _worker_count(stages, chunks, name), microbatches)
        made = replicated(name, counts, microbatches, chunks)
    if name is None:
        _check_asked(made, stages, microbatches, chunks)
    return made, name, _counts(replicas, len(made.workers), microbatches)


def _check_asked(made: Schedule, stages: int | Sequence[int] | None, microbatches: int, chunks: int | None) -> None:
    """Refuse what contradicts a schedule that has its own numbers."""
    workers = len(made.workers)
    if made.microbatches != microbatches:
        wrong, right = f"microbatches={microbatches}", f"use microbatches={made.microbatches}"
    elif isinstance(stages, int) and stages != workers:
        wrong, right = f"stages={stages}", f"use stages={workers}"
    elif chunks is not None and chunks * workers != made.stages:
        wrong, right = f"chunks={chunks}", "leave them out"
    else:
        return
    raise ScheduleError(f"schedule {made.name!r} with {wrong}: it is written down for other numbers: {right}")


def _counts(replicas: int | Sequence[int], workers: int, microbatches: int) -> tuple[int, ...]:
    if not is_count(workers):
        raise ScheduleError(f"stages={workers}: give a whole number (int) of at least 1")
    counts = tuple(replicas) if isinstance(replicas, Iterable) else (replicas,) * workers
    if len(counts) != workers or not all(map(is_count, counts)):
        raise PipelineError(
            f"replicas={replicas!r}: give a whole number of at least 1, or {workers} of them, one per worker"
        )
    if max(counts, default=0) > microbatches:
        raise PipelineError(
            f"replicas={replicas!r} with microbatches={microbatches}: some replicas would never have any: use "
            f"microbatches={max(counts)} or more"
        )
    return counts


def _worker_count(stages: int | Sequence[int], chunks: int | None, schedule: str) -> int:
    if isinstance(stages, int):
        return stages
    per_worker = chunks or default_chunks(schedule)
    pieces = len(stages) + 1
    if pieces % per_worker:
        raise PipelineError(
            f"cut points {list(stages)} make {pieces} pieces, but every worker of {schedule!r} runs {per_worker}: "
            f"give a number of cut points that makes a multiple of {per_worker}"
        )
    return pieces // per_worker


def sufficient_credits(schedule: Schedule, edges: Sequence[ScheduleEdge]) -> int:
    """Prove the schedule, with few messages in flight where that is enough (some need one per micro-batch).

    With half of the credits, because a sender that has run out may not go on before so many are back.
    """
    try:
        _verify(schedule, _CREDITS // 2, edges)
        return _CREDITS
    except ScheduleError:
        # So many are on one edge in all; where stages have replicas, each pair of them has its own credits.
        credits = max(_CREDITS, schedule.microbatches, most_ahead(len(schedule.workers)))
        _verify(schedule, credits, edges)
        return 2 * credits


def _verify(schedule: Schedule, credits: int, edges: Sequence[ScheduleEdge]) -> None:
    verify(schedule, credits=credits, edges=edges)
    if edges:  # evaluation sends stashed values, too
        # Its order repeats itself after as many batches as there are workers.
        verify(forward_on(schedule.placement, 4 * len(schedule.workers)), credits=credits, edges=edges)
