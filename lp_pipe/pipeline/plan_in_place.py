"""A plan in the place of the stages that a program names, while that program is built: `lp_pipe launch --plan`."""

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
    """source: what errors call it, its file. group: of which pipeline; None: of a program's only one.

    pipelines: those that were added meanwhile, each as its program and group. refusal: why one could not take the plan.
    differences: what of the plan does not count, since a program says otherwise.
    """

    plan: Plan
    source: str
    group: str | None = None
    pipelines: list[tuple[Program, str]] = field(default_factory=list)
    refusal: PartitionError | None = None
    differences: list[tuple[Program, str]] = field(default_factory=list)

    def refuse(self, problem: object) -> PartitionError:
        """The error to raise, which names the source; kept, since the program's own code may wrap it."""
        self.refusal = PartitionError(f"{self.source}: {problem}")
        return self.refusal

    def compare(
        self, program: Program, schedule: object, recompute: object, microbatches: int, resources: Resources | None
    ) -> None:
        """With what the program says itself, which comes first; None: it leaves that to the plan."""
        own = getattr(schedule, "name", schedule)
        if self.plan.schedule is not None and own not in (None, self.plan.schedule):
            self._differ(program, "schedule", self.plan.schedule, own)
        if recompute not in (None, "full") and any(stage.recompute == "full" for stage in self.plan.stages):
            self._differ(program, "stages: recompute", "full", recompute)
        if self.plan.microbatches not in (None, microbatches):
            self._differ(program, "microbatches", self.plan.microbatches, microbatches)
        if resources is not None and resources.says_where and any(stage.hosts for stage in self.plan.stages):
            text = f"stages: hosts: the program says itself where they go, by {resources}, which counts"
            self.differences.append((program, f"{self.source}: {text}"))

    def _differ(self, program: Program, what: str, planned: object, own: object) -> None:
        text = (
            f"{what}: the program says {own!r}, which counts, and not the plan's {planned!r}: its memory and times are"
        )
        self.differences.append((program, f"{self.source}: {text} predicted for that"))

    def unused(self, program: Program) -> list[str]:
        """What the program decides otherwise than the plan."""
        return [text for one, text in self.differences if one is program]

    def groups(self, program: Program) -> list[str]:
        """Of the program's pipelines."""
        return [group for one, group in self.pipelines if one is program]

    def check(self, program: Program) -> None:
        """To be called when the program is built.

        Raises:
            PartitionError: none of its pipelines has taken the plan.
        """
        groups = self.groups(program)
        if not groups:
            raise self.refuse("no pipeline to plan: the program has given none to pp.add_pipeline while it was built")
        if self.group is not None and self.group not in groups:
            raise self.refuse(f"group {self.group!r} is no pipeline of the program: there is {', '.join(groups)}")


@contextmanager
def plan_in_place(plan: Plan, source: str, group: str | None = None) -> Iterator[PlanInPlace]:
    """A pipeline that this thread adds to a program in the body gets the plan's stages and replicas, not its own."""
    place = PlanInPlace(plan, source, group)
    token = _current.set(place)
    try:
        yield place
    finally:
        _current.reset(token)


def taken(program: Program, group: str) -> PlanInPlace | None:
    """The plan for the pipeline of that group, which is just being added; None: it has to go by its own stages.

    Raises:
        PartitionError: the plan could be for an earlier pipeline of the program as well.
    """
    place = _current.get()
    if place is None:
        return None
    place.pipelines.append((program, group))
    groups = place.groups(program)
    if groups.count(group) > 1 and place.group in (None, group):
        raise place.refuse(
            f"the program has several pipelines in group {group!r}, and nothing says which one the plan is for: give "
            "each a group of its own, add_pipeline(..., group=...), and say which (--plan-group)"
        )
    if place.group is None and len(groups) > 1:
        raise place.refuse(
            f"the program has several pipelines, in the groups {', '.join(groups)}: say which one the plan is for "
            "(--plan-group)"
        )
    return place if place.group in (None, group) else None


@contextmanager
def explained(place: PlanInPlace | None, group: str) -> Iterator[None]:
    """What is wrong with the stages that are made in the body is wrong with the plan.

    Raises:
        PartitionError: that of the body, with the plan's file, the field and the group.
    """
    try:
        yield
    except LpPipeError as error:
        if place is None:
            raise
        field = "schedule" if isinstance(error, ScheduleError) else "stages"
        raise place.refuse(f"{field}: {error} (pipeline of group {group!r})") from error
