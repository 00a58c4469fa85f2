"""A plan that replaces the stages of a program's pipeline while the program is built: `lp_pipe launch --plan`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from lp_pipe.errors import LpPipeError, PartitionError, ScheduleError
from lp_pipe.pipeline.partitioning.plan import Plan
from lp_pipe.program import Program
from lp_pipe.resources import Resources

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
        """Refuse a finished program none of whose pipelines has taken the plan.

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
