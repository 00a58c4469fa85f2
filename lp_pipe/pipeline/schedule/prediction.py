"""A step as it should run: a schedule's order, with the seconds that each action takes, and without any delay.

A pipeline logs its prediction as an event, from which a page draws the timeline beside what is measured.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.costs import Costs
from lp_pipe.pipeline.schedule.ir import Op, Schedule
from lp_pipe.pipeline.schedule.simulate import Timeline, simulate

EVENT = "schedule"
_MOST_ACTIONS = 20_000  # of an event; a page draws no more
_BACKWARD_SHARE = 2 / 3  # of a stage's seconds where only the sum is known: a backward costs about two forwards


class Prediction(NamedTuple):
    """A schedule and the seconds of its actions. source: where these are from, in words."""

    schedule: Schedule
    costs: Costs
    source: str

    def timeline(self) -> Timeline:
        """Return when each action would run.

        Raises:
            ScheduleError: the schedule is incomplete, or has other stages than the costs.
        """
        return simulate(self.schedule, self.costs)

    def facts(self) -> dict[str, Any] | None:
        """Return the contents of the event, which `from_facts` reads; None if the schedule is too large for one."""
        if sum(map(len, self.schedule.workers)) > _MOST_ACTIONS:
            return None
        costs = self.costs
        return {
            "name": self.schedule.name,
            "workers": [" ".join(map(str, actions)) for actions in self.schedule.workers],
            "forward_s": costs.forward,
            "backward_input_s": costs.backward_input,
            "backward_weight_s": costs.backward_weight,
            "source": self.source,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Read an event.

        Raises:
            ScheduleError, KeyError, ValueError, TypeError: it is none.
        """
        rows = [str(row).split() for row in facts["workers"]]
        if sum(map(len, rows)) > _MOST_ACTIONS:
            raise ScheduleError(f"a schedule of more than {_MOST_ACTIONS:,} actions is not drawn")
        text = "".join(f"{','.join(row)}\n" for row in rows)  # with line ends, so it is never taken for a file's name
        costs = Costs(
            forward=[float(one) for one in facts["forward_s"]],
            backward_input=[float(one) for one in facts["backward_input_s"]],
            backward_weight=[float(one) for one in facts["backward_weight_s"]],
        )
        return cls(Schedule.from_csv(text, str(facts["name"])), costs, str(facts["source"]))


def measured_costs(actions: Iterable[tuple[Op, int, float]], stages: int) -> Costs:
    """Return the median seconds by kind of action and stage. actions: (op, stage, seconds); stages: how many."""
    seconds: dict[tuple[Op, int], list[float]] = {}
    for op, stage, took in actions:
        seconds.setdefault((op, stage), []).append(took)

    def median(op: Op, share: float = 1.0) -> list[float]:
        return [_median(seconds.get((op, stage), [])) * share for stage in range(stages)]

    if any(op in ("I", "W") for op, _ in seconds):
        return Costs(forward=median("F"), backward_input=median("I"), backward_weight=median("W"))
    return Costs(forward=median("F"), backward_input=median("B", 0.5), backward_weight=median("B", 0.5))


def planned_costs(seconds: Iterable[float]) -> Costs:
    """Return costs where only the sum of a stage's forward and backward is known, for each stage."""
    whole = list(seconds)
    half = [one * _BACKWARD_SHARE / 2 for one in whole]
    return Costs(
        forward=[one * (1 - _BACKWARD_SHARE) for one in whole], backward_input=half, backward_weight=list(half)
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
