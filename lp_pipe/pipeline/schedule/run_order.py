"""Running a schedule in thought: an order in which all actions can run, or who waits for whom."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.channels import Channels
from lp_pipe.pipeline.schedule.ir import Action, Schedule, location


def run_order(schedule: Schedule, credits: int | None = None) -> Iterator[tuple[int, Action]]:
    """Yield (worker, action) in an order in which everything can run.

    Workers are sequential processes. An action first receives its input, and at its end hands on its result; that
    blocks while `credits` messages of the channel have not been received yet. In whatever order the workers get their
    turns, they get equally far (Kahn, 1974), so one order proves all. Takes a complete schedule.

    Raises:
        ScheduleError: a deadlock, with the workers in it.
    """
    run = _Run(schedule, credits)
    while run.ready:
        yield from run.advance(run.ready.popleft())
    waits = run.waits()
    if waits:
        raise ScheduleError(_deadlock(schedule, credits, waits))


class _Wait(NamedTuple):
    position: int
    action: Action
    reason: str
    other: int  # the worker that would have to act


class _Run:
    def __init__(self, schedule: Schedule, credits: int | None) -> None:
        self.workers = schedule.workers
        self.channels = Channels(schedule.placement)
        self.limits = [credits if self.channels.crosses(c) else None for c in range(self.channels.count)]
        self.in_flight: list[set[int]] = [set() for _ in range(self.channels.count)]
        self.position = [0] * len(self.workers)
        self.ready = deque(range(len(self.workers)))
        self.waiting_receivers: set[int] = set()  # channels
        self.waiting_senders: dict[int, Action] = {}  # by channel

    def advance(self, worker: int) -> Iterator[tuple[int, Action]]:
        """Run a worker until it has to wait."""
        actions = self.workers[worker]
        while self.position[worker] < len(actions):
            action = actions[self.position[worker]]
            if not self.receive(action):
                return
            yield worker, action
            self.position[worker] += 1
            if not self.send(action):
                return

    def receive(self, action: Action) -> bool:
        channel = self.channels.receives(action)
        if channel is None:
            return True
        if action.microbatch not in self.in_flight[channel]:
            self.waiting_receivers.add(channel)
            return False
        self.in_flight[channel].remove(action.microbatch)
        if channel in self.waiting_senders:
            self.in_flight[channel].add(self.waiting_senders.pop(channel).microbatch)
            self.ready.append(self.channels.sender(channel))
        return True

    def send(self, action: Action) -> bool:
        channel = self.channels.sends(action)
        if channel is None:
            return True
        limit = self.limits[channel]
        if limit is not None and len(self.in_flight[channel]) >= limit:
            self.waiting_senders[channel] = action
            return False
        self.in_flight[channel].add(action.microbatch)
        if channel in self.waiting_receivers:
            self.waiting_receivers.remove(channel)
            self.ready.append(self.channels.receiver(channel))
        return True

    def waits(self) -> dict[int, _Wait]:
        """What every worker that could not finish waits for."""
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
        channel = self.channels.receives(action)
        assert channel is not None, "only actions with an input wait"
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
    """Workers that wait for each other in a ring, from the first one on; all else only waits for them."""
    path: list[int] = []
    worker = min(waits)
    while worker not in path:
        path.append(worker)
        worker = waits[worker].other
    ring = path[path.index(worker) :]
    first = ring.index(min(ring))
    return ring[first:] + ring[:first]
