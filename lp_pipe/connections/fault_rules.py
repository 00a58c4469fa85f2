"""The rules by which faults strike the messages of one direction of a connection, and late delivery."""

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lp_pipe.connections import frames
from lp_pipe.connections.base import OnFrame
from lp_pipe.connections.frames import Frame
from lp_pipe.errors import Unavailable
from lp_pipe.protos import supervision_pb2 as wire

# The messages of users. Credits and cancellations are only delayed: a real connection never loses them alone.
_MESSAGES = frozenset(
    (
        *(frames.CALL, frames.RESULT, frames.ERROR),
        *(frames.STREAM_OPEN, frames.STREAM_ITEM, frames.STREAM_END, frames.CHANNEL_DATA),
    )
)
_LOWEST_TAG = (-(1 << 63)).to_bytes(8, "little", signed=True)


class Direction(NamedTuple):
    """A direction of the connections that a node ("" is the launcher) makes to an endpoint."""

    node: str
    endpoint: str
    is_outgoing: bool


class FaultRule:
    """A fault, and the number of messages (for a cut or partition: connections) that it has struck."""

    def __init__(self, fault: wire.Fault) -> None:
        self.fault = fault
        self.ways = frozenset(Direction(way.node, way.endpoint, way.is_outgoing) for way in fault.ways)
        self.hits = 0
        self._seen = dict.fromkeys(self.ways, 0)
        self._lock = threading.Lock()

    @property
    def closes(self) -> bool:
        return self.fault.action in (wire.Fault.CUT, wire.Fault.PARTITION)

    def hit(self) -> None:
        with self._lock:
            self.hits += 1

    def drops(self, way: Direction, frame: Frame) -> bool:
        """Return whether this message must vanish; counts it."""
        if self.fault.action != wire.Fault.DROP or frame.kind not in _MESSAGES:
            return False
        with self._lock:
            self._seen[way] += 1
            number = self._seen[way] - self.fault.after
            is_struck = number > 0 and (not self.fault.count or number <= self.fault.count)
            self.hits += is_struck
        return is_struck

    def delay_s(self, frame: Frame) -> float:
        if self.fault.action != wire.Fault.DELAY:
            return 0.0
        if frame.kind in _MESSAGES:
            self.hit()
        return self.fault.delay_s


class _DelayedAction(NamedTuple):
    due: float
    act: Callable[[], object]


class FaultyDirection:
    """The frames of one direction, in order: passed on at once by the thread that brings them, or late by another."""

    def __init__(self, way: Direction, deliver: OnFrame, end: Callable[[str], object]) -> None:
        self.way = way
        self._rules: tuple[FaultRule, ...] = ()
        self._is_slow = False
        self._deliver = deliver
        self._end = end
        # an item stays in it while it is delivered, so that nothing overtakes it
        self._late: deque[_DelayedAction] = deque()
        self._changed = threading.Condition()
        self._has_thread = False

    def follow(self, rules: tuple[FaultRule, ...]) -> None:
        """Apply these rules from now on; frames delayed by a rule that has gone are delivered now."""
        with self._changed:
            self._rules = rules
            self._is_slow = any(rule.fault.action == wire.Fault.DELAY for rule in rules)
            self._changed.notify()

    def pass_on(self, frame: Frame) -> None:
        delay_s = 0.0
        for rule in self._rules:
            if rule.drops(self.way, frame):
                if frame.kind != frames.CHANNEL_DATA:
                    return
                frame = _without_value(frame)
            delay_s += rule.delay_s(frame)
        if delay_s or self._late:
            self._after(delay_s, functools.partial(self._deliver, _owned(frame)))
        else:
            self._deliver(frame)

    def end(self, reason: str) -> None:
        """End the direction after the last frame."""
        if self._late:
            self._after(0.0, functools.partial(self._end, reason))
        else:
            self._end(reason)

    def clear(self) -> None:
        with self._changed:
            self._late.clear()
            self._changed.notify()

    def _after(self, delay_s: float, act: Callable[[], object]) -> None:
        with self._changed:
            if not self._has_thread:
                threading.Thread(target=self._run, name="late frames", daemon=True).start()
                self._has_thread = True  # set after the start: the system may be out of threads
            due = time.monotonic() + delay_s
            self._late.append(_DelayedAction(max(due, self._late[-1].due) if self._late else due, act))

    def _run(self) -> None:
        while (late := self._next()) is not None:
            with contextlib.suppress(Unavailable):  # the connection has ended meanwhile, which its on_close reports
                late.act()
            with self._changed:
                if self._late and self._late[0] is late:
                    self._late.popleft()

    def _next(self) -> _DelayedAction | None:
        with self._changed:
            while self._late:
                remaining = self._late[0].due - time.monotonic()
                if remaining <= 0 or not self._is_slow:
                    return self._late[0]
                self._changed.wait(remaining)
            self._has_thread = False
            return None


def _without_value(frame: Frame) -> Frame:
    """Return the frame with a tag that makes a channel's receiver discard the value, as of an aborted operation.

    The message itself must arrive: it holds the layout of later messages, the announcement of shared memory and the
    credit.
    Its body begins with the tag (channels/messages.py).
    """
    return frame._replace(body=_LOWEST_TAG + bytes(frame.body[len(_LOWEST_TAG) :]))


def _owned(frame: Frame) -> Frame:
    """Return the frame with copies of its buffers, which the sender may reuse at once."""
    buffers = [bytearray(buffer) if isinstance(buffer, memoryview | bytearray) else buffer for buffer in frame.buffers]
    return frame._replace(body=bytes(frame.body), buffers=buffers)
