"""Connections that misbehave as a test asks (lp_pipe.testing.faults). Nothing is wrapped before `enable`.

    node a:  client ──► FaultyConnection ──► the carrier's ═══════► node b: server
                          the rules of its directions

Only the connecting side is wrapped: it knows both nodes (its own, and the listener by the endpoint), and all that
    either sends passes through it. So one wrapper serves calls and channels, over every carrier.
"""

import threading
import weakref

from lp_pipe import connections
from lp_pipe.connections import run_endpoints
from lp_pipe.connections.base import Connection, OnClose, OnFrame
from lp_pipe.connections.fault_rules import Direction, FaultRule, FaultyDirection
from lp_pipe.connections.frames import Frame
from lp_pipe.context import current_context
from lp_pipe.errors import Unavailable
from lp_pipe.protos import supervision_pb2 as wire

VARIABLE = "LP_PIPE_FAULTS"  # set in the environment of nodes with connections that can be made to misbehave
LAUNCHER = ""


class FaultyConnection(Connection):
    """A wrapper around a connection that applies the rules of each direction to its frames."""

    def __init__(self, inner: Connection, node: str, endpoint: str) -> None:
        super().__init__(inner.peer)
        self._inner = inner
        self._on_frame: OnFrame | None = None
        self.outgoing = FaultyDirection(Direction(node, endpoint, True), inner.send, inner.close)
        self.incoming = FaultyDirection(Direction(node, endpoint, False), self._deliver, self._mark_closed)

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
        """Close at once; frames in transit are lost."""
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


class _FaultTable:
    """The rules of this process, and the connections that they apply to."""

    def __init__(self) -> None:
        self._rules: dict[str, FaultRule] = {}
        self._connections: weakref.WeakSet[FaultyConnection] = weakref.WeakSet()
        self._lock = threading.Lock()

    def connect(self, endpoint: str, idle_timeout_s: float | None = None) -> Connection:
        node = current_context()
        name = LAUNCHER if node is None else node.name
        listener = run_endpoints.server_name(endpoint)
        self._refuse(listener, name)  # before connecting, so that the listener sees nothing of it
        connection = FaultyConnection(connections.connect_directly(endpoint, idle_timeout_s), name, listener)
        with self._lock:
            self._connections.add(connection)
            self._apply_to(connection)
        try:
            self._refuse(listener, name)  # a partition may have been added in between
        except Unavailable as error:
            connection.cut(str(error))
            raise
        return connection

    def add(self, fault: wire.Fault) -> int:
        rule = FaultRule(fault)
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
        ways = {Direction(node, endpoint, is_outgoing) for is_outgoing in (True, False)}
        for rule in list(self._rules.values()):
            if rule.closes and rule.ways & ways:
                rule.hit()
                raise Unavailable(rule.fault.reason)

    def _apply_to(self, connection: FaultyConnection) -> None:
        for line in (connection.outgoing, connection.incoming):
            line.follow(tuple(rule for rule in self._rules.values() if not rule.closes and line.way in rule.ways))


def enable() -> None:
    """Make the connections that this process makes from now on able to misbehave."""
    connections.use_connector(_table.connect)


def disable() -> None:
    """Leave new connections alone; existing ones stay as they are."""
    connections.use_connector(None)


def is_enabled() -> bool:
    return connections.current_connector() == _table.connect


def apply(fault: wire.Fault) -> int:
    """Install, report on or heal a fault in this process; return how often it has struck so far."""
    actions = {wire.Fault.REPORT: _table.report, wire.Fault.HEAL: _table.heal}
    return actions.get(fault.action, _table.add)(fault)


def hits() -> dict[str, int]:
    """Return how often each lasting fault has struck in this process."""
    return _table.hits()


def _concerns(rule: FaultRule, connection: FaultyConnection) -> bool:
    return not rule.ways.isdisjoint((connection.outgoing.way, connection.incoming.way))


_table = _FaultTable()
