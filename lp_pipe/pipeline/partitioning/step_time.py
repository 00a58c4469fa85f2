"""The time of a whole step of a planned pipeline: its schedule is played with the stages' times, bubble included."""

from collections.abc import Sequence
from typing import NamedTuple

from lp_pipe.pipeline.schedule import replicated
from lp_pipe.pipeline.schedule.channels import Channels
from lp_pipe.pipeline.schedule.run_order import run_order


class StageTiming(NamedTuple):
    """The times of a stage, for one micro-batch on one of its replicas.

    backward_s: with the forward that a recomputed stage runs again. link_s: one way over the boundary before it.
    exchange_s: its replicas' all-reduce, once a step.
    """

    forward_s: float
    backward_s: float
    replicas: int
    link_s: float
    exchange_s: float


def step_seconds(schedule: str, stages: Sequence[StageTiming], microbatches: int) -> float:
    """Return the seconds from the first forward to the last gradient that is exchanged; without the optimizer.

    Micro-batch j runs on replica j mod r. Messages take their time, but do not slow the stages or each other down.

    Raises:
        ScheduleError: the schedule does not exist for these numbers.
    """
    made = replicated(schedule, [stage.replicas for stage in stages], microbatches)
    channels = Channels(made.placement)
    arrivals: dict[tuple[int | None, int], float] = {}
    free_at: dict[tuple[int, int], float] = {}
    for worker, action in run_order(made):
        stage = stages[worker]
        rank = worker, action.microbatch % stage.replicas
        start = max(free_at.get(rank, 0.0), arrivals.pop((channels.receives(action), action.microbatch), 0.0))
        end = free_at[rank] = start + (stage.forward_s if action.op == "F" else stage.backward_s)
        channel = channels.sends(action)
        if channel is not None:
            later = max(channels.sending_stage(channel), channels.receiving_stage(channel))
            delay = stages[later].link_s if channels.crosses(channel) else 0.0
            arrivals[channel, action.microbatch] = end + delay
    return max(end + stages[worker].exchange_s for (worker, _), end in free_at.items())
