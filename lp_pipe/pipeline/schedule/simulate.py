"""When every action of a schedule would run."""

from dataclasses import dataclass
from typing import NamedTuple

from lp_pipe.pipeline.schedule.channels import Channels
from lp_pipe.pipeline.schedule.completeness import check_complete
from lp_pipe.pipeline.schedule.costs import Costs, Seconds, one_each
from lp_pipe.pipeline.schedule.ir import Action, Op, Schedule
from lp_pipe.pipeline.schedule.run_order import run_order
from lp_pipe.pipeline.schedule.stash import peak_activations


class Span(NamedTuple):
    """One action, from start to end in seconds."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a simulated step looks like: its seconds, the workers' mean idle share of them, and each worker's spans."""

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
    spans = _spans(schedule, costs, 0.0 if links is None else links)
    makespan = max(own[-1].end_s if own else 0.0 for own in spans)
    return Timeline(makespan, _bubble(spans, makespan), peak_activations(schedule), tuple(map(tuple, spans)))


class _Plan(NamedTuple):
    """What is the same for all of a stage's forwards, or other actions: channels (None: none) and seconds."""

    receives: int | None
    duration_s: float
    sends: int | None
    delay_s: float


def _spans(schedule: Schedule, costs: Costs, links: Seconds) -> list[list[Span]]:
    """Each worker runs until it lacks an input, and again when that has been sent.

    A loop of its own beside `run_order`, which could also tell it: large schedules have millions of actions.
    """
    plans = _plans(schedule, costs, links)
    arrivals: list[list[float | None]] = [[None] * schedule.microbatches for _ in range(2 * schedule.stages)]
    waiting: dict[int, int] = {}  # channel -> its receiver
    spans: list[list[Span]] = [[] for _ in schedule.workers]
    runnable = list(range(len(spans)))
    while runnable:
        worker = runnable.pop()
        actions, own = schedule.workers[worker], spans[worker]
        now = own[-1].end_s if own else 0.0
        for place in range(len(own), len(actions)):
            action = actions[place]
            op, stage, microbatch = action
            receives, duration_s, sends, delay_s = plans[op][stage]
            if receives is not None:
                arrival = arrivals[receives][microbatch]
                if arrival is None:
                    waiting[receives] = worker
                    break
                arrivals[receives][microbatch] = None  # so that memory is for spans alone
                now = max(now, arrival)
            end_s = now + duration_s
            own.append(Span(action, now, end_s))
            now = end_s
            if sends is not None:
                arrivals[sends][microbatch] = end_s + delay_s
                if sends in waiting:
                    runnable.append(waiting.pop(sends))
    if sum(map(len, spans)) < sum(map(len, schedule.workers)):
        for _ in run_order(schedule):  # says who waits for whom
            pass
    return spans


def _plans(schedule: Schedule, costs: Costs, links: Seconds) -> dict[Op, list[_Plan]]:
    """By op, then by stage."""
    channels = Channels(schedule.placement)
    delays = _delays(channels, links)

    def plan(op: Op, stage: int, duration_s: float) -> _Plan:
        action = Action(op, stage, 0)
        sends = channels.sends(action)
        return _Plan(channels.receives(action), duration_s, sends, 0.0 if sends is None else delays[sends])

    return {
        op: [plan(op, stage, duration_s) for stage, duration_s in enumerate(durations)]
        for op, durations in costs.durations(schedule.stages).items()
    }


def _delays(channels: Channels, links: Seconds) -> list[float]:
    """Seconds by channel."""
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
