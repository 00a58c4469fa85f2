"""Which layers each stage has, on which worker, in which order: what several options of `add_pipeline` decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.chosen_schedule import chosen_schedule
from lp_pipe.pipeline.compute.segments import Recompute
from lp_pipe.pipeline.layers.build import parameter_count
from lp_pipe.pipeline.layers.cuts import balanced_cuts, check_cuts, stage_of
from lp_pipe.pipeline.partitioning.plan import Plan
from lp_pipe.pipeline.planned import as_planned
from lp_pipe.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Layout:
    """cuts: of each later stage the index of its first layer. replicas: of each worker.

    name: by which the schedule can be made again, for another number of micro-batches; None: it cannot.
    plan: where that comes from; None: from the options themselves.
    """

    schedule: Schedule
    name: str | None
    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: Recompute
    plan: Plan | None

    @property
    def chunks(self) -> int:
        """Virtual stages of each worker."""
        return self.schedule.stages // len(self.schedule.workers)

    def replicas_of(self, layer: int) -> int:
        """How many processes have this layer."""
        return self.replicas[self.schedule.placement[stage_of(layer, self.cuts)]]


def layout_of(
    sources: Sequence[Any],
    stages: int | Sequence[int] | Plan | None,
    chunks: int | None,
    schedule: str | Path | Schedule | None,
    microbatches: int,
    replicas: int | Sequence[int],
    recompute: Recompute | None,
) -> Layout:
    """Of a model with these layers; the options are those of `add_pipeline`.

    Raises:
        PipelineError: the model cannot be cut so, or the options contradict each other.
        PartitionError: the plan is for another model.
        ScheduleError: the schedule does not exist for these numbers.
    """
    plan: Plan | None = None
    if isinstance(stages, Plan):
        plan = stages
        _refuse_replicas(replicas)
        stages, replicas, schedule, recompute = as_planned(plan, sources, schedule, recompute, chunks)
    made, name, counts = chosen_schedule(
        "1f1b" if schedule is None else schedule, stages, microbatches, chunks, replicas
    )
    cuts = _cuts(sources, len(made.workers) if stages is None else stages, made)
    return Layout(made, name, tuple(cuts), counts, "none" if recompute is None else recompute, plan)


def _refuse_replicas(replicas: int | Sequence[int]) -> None:
    if replicas != 1:
        raise PipelineError(f"replicas={replicas!r}: the plan of stages= says how many there are; leave them out")


def _cuts(sources: Sequence[Any], stages: int | Sequence[int], schedule: Schedule) -> list[int]:
    pieces = schedule.stages
    if isinstance(stages, int):
        # One more than the parameters: layers without any should not all end up on one stage.
        cuts = balanced_cuts(
            [parameter_count(source) + 1 for source in sources], pieces, pieces // len(schedule.workers)
        )
    else:
        cuts = check_cuts(stages, len(sources))
    if len(cuts) + 1 != pieces:
        raise PipelineError(f"{len(cuts)} cut points make {len(cuts) + 1} stages, but the schedule has {pieces}")
    return cuts
