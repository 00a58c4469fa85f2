"""The times at which every action of a schedule would run."""

from dataclasses import dataclass
from typing import NamedTuple

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.channels import Channels
from lp_pipe.pipeline.schedule.completeness import check_complete
from lp_pipe.pipeline.schedule.costs import Costs, Seconds, one_each
from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.run_order import run_order
from lp_pipe.pipeline.schedule.stash import peak_activations


class Span(NamedTuple):
    """An action with its start and end in seconds."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step: its seconds, the workers' mean idle share of them, and each worker's spans."""

    makespan: float
    bubble: float
    peak_activations: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]


def simulate(schedule: Schedule, costs: Costs, links: Seconds | None = None) -> Timeline:
    """Run every worker's actions in order, each as soon as its input is there.

    "B" takes backward_input + backward_weight. links: seconds that a message takes between stages s and s + 1, one
    number or one per pair; within a worker, and without links, it takes none. Messages do not slow each other down.

    Raises:
        ScheduleError: the schedule is incomplete or deadlocks, or the number of costs or links is wrong.
    """
    check_complete(schedule)
    if not isinstance(costs, Costs):
        raise ScheduleError(f"costs={costs!r}: give pp.Costs(forward=…, backward_input=…, backward_weight=…)")
    channels = Channels(schedule.placement)
    durations = costs.durations(schedule.stages)
    delays = _delays(channels, 0.0 if links is None else links)
    arrivals: dict[tuple[int | None, int], float] = {}  # (channel, micro-batch) -> when
    free_at = [0.0] * len(schedule.workers)
    spans: list[list[Span]] = [[] for _ in schedule.workers]
    for worker, action in run_order(schedule):
        start = max(free_at[worker], arrivals.pop((channels.receives(action), action.microbatch), 0.0))
        end = start + durations[action.op][action.stage]
        channel = channels.sends(action)
        if channel is not None:
            arrivals[channel, action.microbatch] = end + delays[channel]
        free_at[worker] = end
        spans[worker].append(Span(action, start, end))
    makespan = max(free_at)
    return Timeline(makespan, _bubble(spans, makespan), peak_activations(schedule), tuple(map(tuple, spans)))


def _delays(channels: Channels, links: Seconds) -> list[float]:
    """Return the seconds of a message, by channel."""
    per_edge = one_each(links, len(channels.placement) - 1, "links", "pair of neighbouring stages")
    return [_delay(channels, channel, per_edge) for channel in range(channels.count)]


def _delay(channels: Channels, channel: int, per_edge: list[float]) -> float:
    if not channels.crosses(channel):
        return 0.0
    return per_edge[min(channels.sending_stage(channel), channels.receiving_stage(channel))]


def _bubble(spans: list[list[Span]], makespan: float) -> float:
    if not makespan:
        return 0.0
    busy = sum(span.end_s - span.start_s for row in spans for span in row)
    return 1 - busy / (makespan * len(spans))
