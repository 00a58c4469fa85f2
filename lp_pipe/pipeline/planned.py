"""The options that a plan sets in `add_pipeline`: cuts, replicas, and schedule and recompute by default."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lp_pipe.errors import PartitionError
from lp_pipe.pipeline.compute.recompute_option import FullStages, Recompute
from lp_pipe.pipeline.layers.model_names import layer_names
from lp_pipe.pipeline.partitioning.plan import Plan, PlannedStage
from lp_pipe.pipeline.partitioning.reasons import seconds
from lp_pipe.pipeline.schedule import Schedule, default_chunks


class Planned(NamedTuple):
    """Options of `add_pipeline` from a plan."""

    cuts: list[int]
    replicas: list[int]
    schedule: str | Path | Schedule
    recompute: Recompute


def options_from_plan(
    plan: Plan,
    sources: Sequence[Any],
    schedule: str | Path | Schedule | None,
    recompute: Recompute | None,
    chunks: int | None,
) -> Planned:
    """Return the options for a model of these layers.

    schedule, recompute: the user's, which come before the plan's.

    Raises:
        PartitionError: the plan is for another model, or the user's schedule has several stages on each worker.
        ScheduleError: the plan's schedule does not exist, even if the user's own replaces it.
    """
    cuts = plan.cuts(layer_names(sources))
    if plan.schedule is not None:
        default_chunks(plan.schedule)
    chosen = schedule if schedule is not None else plan.schedule or "1f1b"
    if isinstance(chosen, str) and (chunks or default_chunks(chosen)) > 1:
        raise PartitionError(
            f"schedule {chosen!r} runs {chunks or default_chunks(chosen)} stages on each worker, but a plan has one "
            "worker for each stage: use another schedule, or give stages= as cut points"
        )
    again = recompute if recompute is not None else _recompute(plan, cuts)
    return Planned(cuts, [stage.replicas for stage in plan.stages], chosen, again)


def notes(plan: Plan, stage: int, replica: int) -> tuple[str, ...]:
    """Return what a picture of the program says on the node that runs this replica of a stage."""
    planned = plan.stages[stage]
    counted = f"{len(planned.layers)} layer{'s' if len(planned.layers) > 1 else ''}"
    lines = [
        f"stage {stage}" + (f", replica {replica} of {planned.replicas}" if planned.replicas > 1 else ""),
        f"{counted}: {planned.layers[0]}" + (f" … {planned.layers[-1]}" if len(planned.layers) > 1 else ""),
        *_times(planned),
        *([f"host {host}"] if (host := planned_host(plan, stage, replica)) is not None else []),
    ]
    return tuple(lines)


def planned_host(plan: Plan | None, stage: int, replica: int) -> int | str | None:
    """Return the plan's host for this replica: a name, or a number among the hosts of a launch; None without one."""
    hosts = plan.stages[stage].hosts if plan is not None else ()
    return hosts[replica] if hosts else None


def replica_seconds(plan: Plan | None) -> tuple[float, ...]:
    """Return the predicted time of each stage's replicas for each of their own micro-batches; empty without a plan."""
    return tuple(stage.predicted_seconds * stage.replicas for stage in plan.stages) if plan is not None else ()


def _times(stage: PlannedStage) -> list[str]:
    """Return the stage's predicted times in words; none if a person has written the plan."""
    if not stage.predicted_seconds:
        return []
    boundary = f", boundary {seconds(stage.boundary_seconds)}" if stage.boundary_seconds else ""
    again = ", recomputed" if stage.recompute == "full" else ""
    return [f"{seconds(stage.predicted_seconds)}{boundary}{again}"]


def _recompute(plan: Plan, cuts: Sequence[int]) -> Recompute:
    firsts = [0, *cuts]
    full = [first for first, stage in zip(firsts, plan.stages, strict=True) if stage.recompute == "full"]
    if len(full) in (0, len(firsts)):
        return "full" if full else "none"
    return FullStages(frozenset(full))
