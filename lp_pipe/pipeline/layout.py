"""Choose the layers of each stage, its worker and the schedule, from several options of `add_pipeline`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lp_pipe.errors import PipelineError, ScheduleError
from lp_pipe.pipeline.compute.recompute_option import Recompute
from lp_pipe.pipeline.layers.build import parameter_count
from lp_pipe.pipeline.layers.cuts import balanced_cuts, check_cuts, stage_of
from lp_pipe.pipeline.partitioning.plan import Plan
from lp_pipe.pipeline.planned import options_from_plan
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


@dataclass(frozen=True)
class StageLayout:
    """The layers of each stage, its worker, and the schedule.

    cuts: of each later stage the index of its first layer.
    replicas: of each worker.
    name: by which the schedule can be made again, for another number of micro-batches; None: it cannot.
    plan: where all of it comes from; None: from the options themselves.
    """

    schedule: Schedule
    name: str | None
    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: Recompute
    plan: Plan | None

    @property
    def chunks(self) -> int:
        """The number of virtual stages of each worker."""
        return self.schedule.stages // len(self.schedule.workers)

    def replicas_of(self, layer: int) -> int:
        """Return how many processes have this layer."""
        return self.replicas[self.schedule.placement[stage_of(layer, self.cuts)]]


def layout_of(
    sources: Sequence[Any],
    stages: int | Sequence[int] | Plan | None,
    chunks: int | None,
    schedule: str | Path | Schedule | None,
    microbatches: int,
    replicas: int | Sequence[int],
    recompute: Recompute | None,
) -> StageLayout:
    """Return the layout of a model with these layers; the options are those of `add_pipeline`.

    Raises:
        PipelineError: the model cannot be cut so, or the options contradict each other.
        PartitionError: the plan is for another model.
        ScheduleError: the schedule does not exist for these numbers.
    """
    plan: Plan | None = None
    if isinstance(stages, Plan):
        plan = stages
        _refuse_replicas(replicas)
        stages, replicas, schedule, recompute = options_from_plan(plan, sources, schedule, recompute, chunks)
    made, name, counts = choose_schedule(
        "1f1b" if schedule is None else schedule, stages, microbatches, chunks, replicas
    )
    cuts = _cuts(sources, len(made.workers) if stages is None else stages, made)
    return StageLayout(made, name, tuple(cuts), counts, "none" if recompute is None else recompute, plan)


def _refuse_replicas(replicas: int | Sequence[int]) -> None:
    if replicas != 1:
        raise PipelineError(
            f"replicas={replicas!r}: the plan in stages= has the numbers of replicas; leave this option out"
        )


def _cuts(sources: Sequence[Any], stages: int | Sequence[int], schedule: Schedule) -> list[int]:
    pieces = schedule.stages
    if isinstance(stages, int):
        # One more than the parameters: not all layers without parameters should be on one stage.
        cuts = balanced_cuts(
            [parameter_count(source) + 1 for source in sources], pieces, pieces // len(schedule.workers)
        )
    else:
        cuts = check_cuts(stages, len(sources))
    if len(cuts) + 1 != pieces:
        raise PipelineError(f"{len(cuts)} cut points make {len(cuts) + 1} stages, but the schedule has {pieces}")
    return cuts


DEFAULT_STAGES = 2
_CREDITS = 4


def choose_schedule(
    schedule: str | Path | Schedule,
    stages: int | Sequence[int] | None,
    microbatches: int,
    chunks: int | None,
    replicas: int | Sequence[int],
) -> tuple[Schedule, str | None, tuple[int, ...]]:
    """Return the schedule, its name and each worker's replicas.

    The name is None if the schedule cannot be made again for another number of micro-batches.

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
    """Refuse numbers that contradict a schedule that has its own."""
    workers = len(made.workers)
    if made.microbatches != microbatches:
        wrong, right = f"microbatches={microbatches}", f"use microbatches={made.microbatches}"
    elif isinstance(stages, int) and stages != workers:
        wrong, right = f"stages={stages}", f"use stages={workers}"
    elif chunks is not None and chunks * workers != made.stages:
        wrong, right = f"chunks={chunks}", "leave them out"
    else:
        return
    raise ScheduleError(f"schedule {made.name!r} with {wrong}: it was written for other numbers: {right}")


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
            f"replicas={replicas!r} with microbatches={microbatches}: some replicas would have no micro-batch: use "
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
            f"give cut points for a multiple of {per_worker} pieces"
        )
    return pieces // per_worker


def sufficient_credits(schedule: Schedule, edges: Sequence[ScheduleEdge]) -> int:
    """Verify the schedule, and return the messages that may be in flight: few if that is enough.

    Some schedules need one per micro-batch. The verifier gets half of the credits, because a sender that has run out
    may not go on before so many are back.
    """
    try:
        _verify(schedule, _CREDITS // 2, edges)
        return _CREDITS
    except ScheduleError:
        # No edge has more messages; if stages have replicas, each pair of them has its own credits.
        credits = max(_CREDITS, schedule.microbatches, most_ahead(len(schedule.workers)))
        _verify(schedule, credits, edges)
        return 2 * credits


def _verify(schedule: Schedule, credits: int, edges: Sequence[ScheduleEdge]) -> None:
    verify(schedule, credits=credits, edges=edges)
    if edges:  # evaluation sends stashed values, too
        # Its order repeats after as many batches as there are workers.
        verify(forward_on(schedule.placement, 4 * len(schedule.workers)), credits=credits, edges=edges)
