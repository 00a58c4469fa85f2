"""The proof, before anything is launched, that a schedule works."""

from collections import defaultdict
from collections.abc import Sequence

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.channels import Channels, ScheduleEdge
from lp_pipe.pipeline.schedule.completeness import check_complete
from lp_pipe.pipeline.schedule.ir import Schedule, location
from lp_pipe.pipeline.schedule.numbers_given import as_int, is_count
from lp_pipe.pipeline.schedule.run_order import run_order
from lp_pipe.pipeline.schedule.stash import check_memory

# Kinds of actions that must run in micro-batch order on a stage: forwards, and those that add to gradients.
_ORDERED = {"F": "forward", "B": "gradient", "W": "gradient"}


def verify(
    schedule: Schedule,
    credits: int | None = None,
    memory: int | Sequence[int] | None = None,
    edges: Sequence[ScheduleEdge] = (),
) -> None:
    """Refuse a schedule that is incomplete, inexact, stuck or too large.

    credits: messages that may be sent and not yet received on each directed edge between two workers; None is no limit.
    memory: activations that a worker may stash, one number or one per worker; None is no limit.
    edges: channels beside those between neighbouring stages: of stashed values, and of tied parameters' gradients.
    Takes seconds for millions of actions.

    Raises:
        ScheduleError: names the first offending worker, position and action.
    """
    credits = as_int(credits)
    if credits is not None and not is_count(credits):
        why = "nothing can be sent: use 1 or more" if credits == 0 else "give a whole number of at least 1, or None"
        raise ScheduleError(f"schedule {schedule.name!r} with credits={credits!r}: {why}")
    check_complete(schedule)
    _check_microbatch_order(schedule)
    _check_channel_order(schedule, edges)
    for _ in run_order(schedule, credits, edges):
        pass
    if memory is not None:
        check_memory(schedule, memory)


def _check_microbatch_order(schedule: Schedule) -> None:
    """Refuse gradients that are not summed in index order, as a plain loop does.

    Floating-point sums depend on the order.
    """
    for worker, actions in enumerate(schedule.workers):
        expected: defaultdict[tuple[int, str], int] = defaultdict(int)
        for position, action in enumerate(actions):
            kind = _ORDERED.get(action.op)
            if kind is None:
                continue
            key = action.stage, kind
            if action.microbatch != expected[key]:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: {location(worker, position, action)}: runs before micro-batch "
                    f"{expected[key]}: order each stage's {kind}s by micro-batch"
                )
            expected[key] += 1


def _check_channel_order(schedule: Schedule, edges: Sequence[ScheduleEdge]) -> None:
    """Refuse receivers that take messages in another order than that in which they were sent.

    A channel is a queue.
    """
    channels = Channels(schedule.placement, tuple(edges))
    sent, received = _messages(schedule, channels)
    for channel in filter(channels.crosses, range(channels.count)):
        for expected, microbatch in zip(sent[channel], received[channel], strict=True):
            if expected != microbatch:
                raise ScheduleError(_out_of_turn(schedule, channels, channel, microbatch, expected))


def _messages(schedule: Schedule, channels: Channels) -> tuple[list[list[int]], list[list[int]]]:
    """Return the micro-batches that every channel carries, in the order of its sender and of its receiver."""
    sent: list[list[int]] = [[] for _ in range(channels.count)]
    received: list[list[int]] = [[] for _ in range(channels.count)]
    for actions in schedule.workers:
        for action in actions:
            for channel in channels.all_sent(action):
                sent[channel].append(action.microbatch)
            for channel in channels.all_received(action):
                received[channel].append(action.microbatch)
    return sent, received


def _out_of_turn(schedule: Schedule, channels: Channels, channel: int, microbatch: int, expected: int) -> str:
    worker, sender = channels.receiver(channel), channels.sender(channel)
    position, action = next(
        (position, action)
        for position, action in enumerate(schedule.workers[worker])
        if channel in channels.all_received(action) and action.microbatch == microbatch
    )
    return (
        f"schedule {schedule.name!r}: {location(worker, position, action)}: worker {sender} sends micro-batch "
        f"{expected} of stage {channels.sending_stage(channel)} first: receive in the order of sending"
    )
