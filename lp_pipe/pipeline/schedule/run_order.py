"""An order in which all actions of a schedule can run, or the deadlock that prevents it."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.channels import Channels, ScheduleEdge
from lp_pipe.pipeline.schedule.ir import Action, Schedule, location


def run_order(
    schedule: Schedule, credits: int | None = None, edges: Sequence[ScheduleEdge] = ()
) -> Iterator[tuple[int, Action]]:
    """Yield (worker, action) in an order in which everything can run.

    Workers are sequential processes. An action first receives its inputs, and at its end hands on its results; that
    blocks while `credits` messages of the channel have not been received yet (on `edges`: `Channels.capacity`). In
    whatever order the workers get their turns, they get equally far (Kahn, 1974), so one order proves all. Takes a
    complete schedule.

    Raises:
        ScheduleError: a deadlock, with the workers in it.
    """
    run = _Run(schedule, credits, edges)
    while run.ready:
        yield from run.advance(run.ready.popleft())
    waits = run.waits()
    if waits:
        raise ScheduleError(_deadlock(schedule, credits, waits))


class _Wait(NamedTuple):
    position: int
    action: Action
    reason: str
    blocking_worker: int  # the worker that has to act first


class _Run:
    def __init__(self, schedule: Schedule, credits: int | None, edges: Sequence[ScheduleEdge]) -> None:
        self.workers = schedule.workers
        self.channels = Channels(schedule.placement, tuple(edges))
        self.limits = [self._limit(channel, credits) for channel in range(self.channels.count)]
        self.in_flight: list[set[int]] = [set() for _ in range(self.channels.count)]
        self.position = [0] * len(self.workers)
        self.inputs: list[list[int] | None] = [None for _ in self.workers]  # channels that the next action waits for
        self.outputs: list[list[int]] = [[] for _ in self.workers]  # channels that the last one still has to send on
        self.ready = deque(range(len(self.workers)))
        self.waiting_receivers: set[int] = set()  # channels
        self.waiting_senders: dict[int, Action] = {}  # by channel

    def advance(self, worker: int) -> Iterator[tuple[int, Action]]:
        """Run a worker until it has to wait."""
        actions = self.workers[worker]
        while self.send_all(worker) and self.position[worker] < len(actions):
            action = actions[self.position[worker]]
            if not self.receive_all(worker, action):
                return
            yield worker, action
            self.position[worker] += 1
            self.outputs[worker] = self.channels.all_sent(action)

    def receive_all(self, worker: int, action: Action) -> bool:
        inputs = self.inputs[worker]
        if inputs is None:
            inputs = self.inputs[worker] = self.channels.all_received(action)
        while inputs and self.receive(inputs[0], action):
            del inputs[0]
        if inputs:
            return False
        self.inputs[worker] = None
        return True

    def send_all(self, worker: int) -> bool:
        outputs = self.outputs[worker]
        while outputs:
            if not self.send(outputs.pop(0), self.workers[worker][self.position[worker] - 1]):
                return False
        return True

    def receive(self, channel: int, action: Action) -> bool:
        if action.microbatch not in self.in_flight[channel]:
            self.waiting_receivers.add(channel)
            return False
        self.in_flight[channel].remove(action.microbatch)
        if channel in self.waiting_senders:
            self.in_flight[channel].add(self.waiting_senders.pop(channel).microbatch)
            self.ready.append(self.channels.sender(channel))
        return True

    def send(self, channel: int, action: Action) -> bool:
        """Put a message on a channel; False: the channel is full, and its next receiver lets the sender go on."""
        limit = self.limits[channel]
        if limit is not None and len(self.in_flight[channel]) >= limit:
            self.waiting_senders[channel] = action
            return False
        self.in_flight[channel].add(action.microbatch)
        if channel in self.waiting_receivers:
            self.waiting_receivers.remove(channel)
            self.ready.append(self.channels.receiver(channel))
        return True

    def _limit(self, channel: int, credits: int | None) -> int | None:
        if credits is None or not self.channels.crosses(channel):
            return None
        return self.channels.capacity(channel, credits)

    def waits(self) -> dict[int, _Wait]:
        """Return what every worker waits for that could not finish."""
        waits = {
            self.channels.sender(channel): self._wait_for_credit(channel, action)
            for channel, action in self.waiting_senders.items()
        }
        for worker, position in enumerate(self.position):
            if worker not in waits and position < len(self.workers[worker]):
                waits[worker] = self._wait_for_input(worker)
        return waits

    def _wait_for_input(self, worker: int) -> _Wait:
        position = self.position[worker]
        action = self.workers[worker][position]
        inputs = self.inputs[worker]
        assert inputs, "only actions with an input wait"
        channel = inputs[0]
        needed = Action("F" if action.op == "F" else "B", self.channels.sending_stage(channel), action.microbatch)
        other = self.channels.sender(channel)
        return _Wait(position, action, f"waits for {needed} of worker {other}", other)

    def _wait_for_credit(self, channel: int, action: Action) -> _Wait:
        other = self.channels.receiver(channel)
        reason = f"cannot send until worker {other} receives an earlier message of stage {action.stage}"
        return _Wait(self.position[self.channels.sender(channel)] - 1, action, reason, other)


def _deadlock(schedule: Schedule, credits: int | None, waits: dict[int, _Wait]) -> str:
    links = [
        f"{location(worker, waits[worker].position, waits[worker].action)} {waits[worker].reason}"
        for worker in _cycle(waits)
    ]
    more = "" if credits is None else f", or allow more than {credits} message(s) on an edge"
    return f"schedule {schedule.name!r}: deadlock: {'; '.join(links)}: reorder the actions{more}"


def _cycle(waits: dict[int, _Wait]) -> list[int]:
    """Return the workers that wait for each other in a ring, from the first one on."""
    path: list[int] = []
    worker = min(waits)
    while worker not in path:
        path.append(worker)
        worker = waits[worker].blocking_worker
    ring = path[path.index(worker) :]
    first = ring.index(min(ring))
    return ring[first:] + ring[:first]
