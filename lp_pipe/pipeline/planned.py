"""A plan in `add_pipeline`: the options that it sets, and a plan that replaces a program's own stages.

The latter is `lp_pipe launch --plan`: it applies while the program is built.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lp_pipe.errors import LpPipeError, PartitionError, ScheduleError
from lp_pipe.pipeline.compute.recompute_option import FullStages, Recompute
from lp_pipe.pipeline.layers.model_names import layer_names
from lp_pipe.pipeline.partitioning.plan import Plan, PlannedStage
from lp_pipe.pipeline.partitioning.reasons import seconds
from lp_pipe.pipeline.schedule import Schedule, default_chunks
from lp_pipe.program import Program
from lp_pipe.resources import Resources


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


_current: ContextVar["PlanInPlace | None"] = ContextVar("plan_in_place", default=None)


@dataclass
class PlanInPlace:
    """A plan for a pipeline of the program that is being built.

    source: the plan's file, for errors.
    group: of the pipeline; None: the program's only one.
    pipelines: those that were added so far, each as its program and group.
    refusal: why a pipeline could not take the plan.
    differences: fields of the plan that do not count, since the program decides them itself.
    """

    plan: Plan
    source: str
    group: str | None = None
    pipelines: list[tuple[Program, str]] = field(default_factory=list)
    refusal: PartitionError | None = None
    differences: list[tuple[Program, str]] = field(default_factory=list)

    def refuse(self, problem: object) -> PartitionError:
        """Return the error to raise, which names the source; it is kept, since the program's own code may wrap it."""
        self.refusal = PartitionError(f"{self.source}: {problem}")
        return self.refusal

    def compare(
        self, program: Program, schedule: object, recompute: object, microbatches: int, resources: Resources | None
    ) -> None:
        """Note where the program's own options, which come first, differ from the plan.

        None leaves an option to the plan.
        """
        own = getattr(schedule, "name", schedule)
        if self.plan.schedule is not None and own not in (None, self.plan.schedule):
            self._differ(program, "schedule", self.plan.schedule, own)
        if recompute not in (None, "full") and any(stage.recompute == "full" for stage in self.plan.stages):
            self._differ(program, "stages: recompute", "full", recompute)
        if self.plan.microbatches not in (None, microbatches):
            self._differ(program, "microbatches", self.plan.microbatches, microbatches)
        if resources is not None and resources.says_where and any(stage.hosts for stage in self.plan.stages):
            text = f"stages: hosts: the program itself chooses the hosts, by {resources}, which comes first"
            self.differences.append((program, f"{self.source}: {text}"))

    def _differ(self, program: Program, what: str, planned: object, own: object) -> None:
        text = f"{what}: the program's {own!r} comes first, not the plan's {planned!r}: the plan's memory and times are"
        self.differences.append((program, f"{self.source}: {text} predicted for that"))

    def unused(self, program: Program) -> list[str]:
        """Return the fields of the plan that the program decides otherwise."""
        return [text for one, text in self.differences if one is program]

    def groups(self, program: Program) -> list[str]:
        """Return the groups of the program's pipelines."""
        return [group for one, group in self.pipelines if one is program]

    def check(self, program: Program) -> None:
        """Refuse a finished program if no pipeline of it has taken the plan.

        Raises:
            PartitionError: the program has no pipeline, or none in the plan's group.
        """
        groups = self.groups(program)
        if not groups:
            raise self.refuse("no pipeline to plan: the program has not called pp.add_pipeline while it was built")
        if self.group is not None and self.group not in groups:
            raise self.refuse(
                f"group {self.group!r} is no pipeline of the program: its pipelines are in {', '.join(groups)}"
            )


@contextmanager
def plan_in_place(plan: Plan, source: str, group: str | None = None) -> Iterator[PlanInPlace]:
    """Let a pipeline that this thread adds to a program in the body have the plan's stages and replicas."""
    place = PlanInPlace(plan, source, group)
    token = _current.set(place)
    try:
        yield place
    finally:
        _current.reset(token)


def plan_for(program: Program, group: str) -> PlanInPlace | None:
    """Return the plan for the pipeline of that group, which is being added; None: it has to use its own stages.

    Raises:
        PartitionError: the plan could also be for an earlier pipeline of the program.
    """
    place = _current.get()
    if place is None:
        return None
    place.pipelines.append((program, group))
    groups = place.groups(program)
    if groups.count(group) > 1 and place.group in (None, group):
        raise place.refuse(
            f"the program has several pipelines in group {group!r}, and the plan could be for any of them: give each "
            "its own group, add_pipeline(..., group=...), and choose one (--plan-group)"
        )
    if place.group is None and len(groups) > 1:
        raise place.refuse(
            f"the program has several pipelines, in the groups {', '.join(groups)}, and the plan could be for any of "
            "them: choose one (--plan-group)"
        )
    return place if place.group in (None, group) else None


@contextmanager
def errors_of_plan(place: PlanInPlace | None, group: str) -> Iterator[None]:
    """Turn errors about the stages that are made in the body into errors of the plan.

    Raises:
        PartitionError: the error of the body, with the plan's file, the field and the group.
    """
    try:
        yield
    except LpPipeError as error:
        if place is None:
            raise
        field = "schedule" if isinstance(error, ScheduleError) else "stages"
        raise place.refuse(f"{field}: {error} (pipeline of group {group!r})") from error
