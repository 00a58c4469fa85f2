"""Connections that misbehave as a test asks (lp_pipe.testing.faults); nothing is in the way before `enable`.

    node a:  client ──► FaultyConnection ──► the carrier's ═══════► node b: server
                          its ways' rules

Only the side that connects is wrapped: it knows who both are, itself and (by the endpoint) the listener, and everything
that either says passes through it. So one wrapper serves calls and channels, over every carrier.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lp_pipe import connections
from lp_pipe.connections import frames, spanning
from lp_pipe.connections.base import Connection, OnClose, OnFrame
from lp_pipe.connections.frames import Frame
from lp_pipe.context import current_context
from lp_pipe.errors import Unavailable
from lp_pipe.protos import supervision_pb2 as wire

VARIABLE = "LP_PIPE_FAULTS"  # set in the environment of nodes whose connections may be asked to misbehave
LAUNCHER = ""

# What users say to each other. Credits and cancelled calls are only delayed: a connection never loses them.
_MESSAGES = frozenset(
    (
        *(frames.CALL, frames.RESULT, frames.ERROR),
        *(frames.STREAM_OPEN, frames.STREAM_ITEM, frames.STREAM_END, frames.CHANNEL_DATA),
    )
)
_LOWEST_TAG = (-(1 << 63)).to_bytes(8, "little", signed=True)


class Way(NamedTuple):
    """One direction of the connections that a node ("" is the launcher) makes to an endpoint."""

    node: str
    endpoint: str
    is_outgoing: bool


class Rule:
    """A fault, and how many messages (of a cut or partition: connections) it has struck."""

    def __init__(self, fault: wire.Fault) -> None:
        self.fault = fault
        self.ways = frozenset(Way(way.node, way.endpoint, way.is_outgoing) for way in fault.ways)
        self.hits = 0
        self._seen = dict.fromkeys(self.ways, 0)
        self._lock = threading.Lock()

    @property
    def closes(self) -> bool:
        return self.fault.action in (wire.Fault.CUT, wire.Fault.PARTITION)

    def hit(self) -> None:
        with self._lock:
            self.hits += 1

    def drops(self, way: Way, frame: Frame) -> bool:
        """Whether this message must vanish; counts it."""
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


class FaultyConnection(Connection):
    """Another connection, whose frames pass the rules of their way."""

    def __init__(self, inner: Connection, node: str, endpoint: str) -> None:
        super().__init__(inner.peer)
        self._inner = inner
        self._on_frame: OnFrame | None = None
        self.outgoing = _Line(Way(node, endpoint, True), inner.send, inner.close)
        self.incoming = _Line(Way(node, endpoint, False), self._deliver, self._mark_closed)

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self._on_frame = on_frame
        self._inner.start(self.incoming.pass_on, self.incoming.end)
        self._attach(on_close)

    def send(self, frame: Frame) -> None:
        if self._closed_reason is not None:
            raise Unavailable(f"connection to {self.peer} is closed: {self._closed_reason}")
        self.outgoing.pass_on(frame)

    def close(self, reason: str = "closed") -> None:
        self._mark_closed(reason)
        self.outgoing.end(reason)

    def cut(self, reason: str) -> None:
        """Close at once; what is on its way is lost."""
        self.outgoing.clear()
        self.incoming.clear()
        self._inner.close(reason)
        self._mark_closed(reason)

    def _deliver(self, frame: Frame) -> None:
        assert self._on_frame is not None
        try:
            self._on_frame(frame)
        except BaseException as error:
            self.cut(f"a frame could not be handled: {type(error).__name__}: {error}")
            raise


class _Late(NamedTuple):
    due: float
    act: Callable[[], object]


class _Line:
    """Frames of one way, in order: passed on at once by the thread that brings them, or late by one of its own."""

    def __init__(self, way: Way, deliver: OnFrame, end: Callable[[str], object]) -> None:
        self.way = way
        self._rules: tuple[Rule, ...] = ()
        self._is_slow = False
        self._deliver = deliver
        self._end = end
        self._late: deque[_Late] = deque()  # what is being delivered stays in it: nothing may overtake
        self._changed = threading.Condition()
        self._has_thread = False

    def follow(self, rules: tuple[Rule, ...]) -> None:
        """From now on; what is late because of a rule that has gone is delivered now."""
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
        """After the last frame."""
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
            due = time.monotonic() + delay_s
            self._late.append(_Late(max(due, self._late[-1].due) if self._late else due, act))
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="late frames", daemon=True).start()

    def _run(self) -> None:
        while (late := self._next()) is not None:
            with contextlib.suppress(Unavailable):  # the connection has ended meanwhile: its on_close tells
                late.act()
            with self._changed:
                if self._late and self._late[0] is late:
                    self._late.popleft()

    def _next(self) -> _Late | None:
        with self._changed:
            while self._late:
                remaining = self._late[0].due - time.monotonic()
                if remaining <= 0 or not self._is_slow:
                    return self._late[0]
                self._changed.wait(remaining)
            self._has_thread = False
            return None


class _Table:
    """This process's rules, and the connections that they apply to."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._connections: weakref.WeakSet[FaultyConnection] = weakref.WeakSet()
        self._lock = threading.Lock()

    def connect(self, endpoint: str, idle_timeout_s: float | None = None) -> Connection:
        node = current_context()
        name = LAUNCHER if node is None else node.name
        listener = spanning.known_as(endpoint)
        self._refuse(listener, name)  # first, so that the listener sees nothing of it
        connection = FaultyConnection(connections.connect_directly(endpoint, idle_timeout_s), name, listener)
        with self._lock:
            self._connections.add(connection)
            self._apply_to(connection)
        try:
            self._refuse(listener, name)  # a partition may have come in between
        except Unavailable as error:
            connection.cut(str(error))
            raise
        return connection

    def add(self, fault: wire.Fault) -> int:
        rule = Rule(fault)
        with self._lock:
            if fault.action != wire.Fault.CUT:
                self._rules[fault.rule] = rule
            struck = [connection for connection in self._connections if rule.closes and _concerns(rule, connection)]
            for connection in self._connections:
                self._apply_to(connection)
        for connection in struck:
            if connection.closed_reason is None:
                rule.hit()
                connection.cut(fault.reason)
        return rule.hits

    def report(self, fault: wire.Fault) -> int:
        rule = self._rules.get(fault.rule)
        return rule.hits if rule is not None else 0

    def hits(self) -> dict[str, int]:
        return {name: rule.hits for name, rule in list(self._rules.items())}

    def heal(self, fault: wire.Fault) -> int:
        with self._lock:
            rule = self._rules.pop(fault.rule, None)
            for connection in self._connections:
                self._apply_to(connection)
        return rule.hits if rule is not None else 0

    def _refuse(self, endpoint: str, node: str) -> None:
        ways = {Way(node, endpoint, is_outgoing) for is_outgoing in (True, False)}
        for rule in list(self._rules.values()):
            if rule.closes and rule.ways & ways:
                rule.hit()
                raise Unavailable(rule.fault.reason)

    def _apply_to(self, connection: FaultyConnection) -> None:
        for line in (connection.outgoing, connection.incoming):
            line.follow(tuple(rule for rule in self._rules.values() if not rule.closes and line.way in rule.ways))


def enable() -> None:
    """From now on the connections that this process makes can be asked to misbehave."""
    connections.use_connector(_table.connect)


def disable() -> None:
    """The connections that were made stay as they are; new ones are left alone."""
    connections.use_connector(None)


def is_enabled() -> bool:
    return connections.current_connector() == _table.connect


def apply(fault: wire.Fault) -> int:
    """Install, report on or heal a fault in this process; returns how often it has struck so far."""
    actions = {wire.Fault.REPORT: _table.report, wire.Fault.HEAL: _table.heal}
    return actions.get(fault.action, _table.add)(fault)


def hits() -> dict[str, int]:
    """How often each fault that lasts has struck in this process."""
    return _table.hits()


def _concerns(rule: Rule, connection: FaultyConnection) -> bool:
    return not rule.ways.isdisjoint((connection.outgoing.way, connection.incoming.way))


def _without_value(frame: Frame) -> Frame:
    """What a channel's receiver throws away unseen, as it does with left-overs of an aborted operation.

    The message itself must arrive: the layout of those after it, the announcement of shared memory and the credit
    are in it. Its body begins with the tag (channels/messages.py).
    """
    return frame._replace(body=_LOWEST_TAG + bytes(frame.body[len(_LOWEST_TAG) :]))


def _owned(frame: Frame) -> Frame:
    """Who sends may use his buffers again at once."""
    buffers = [bytearray(buffer) if isinstance(buffer, memoryview | bytearray) else buffer for buffer in frame.buffers]
    return frame._replace(body=bytes(frame.body), buffers=buffers)


_table = _Table()
