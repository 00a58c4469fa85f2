"""The one place that knows the whole program: addresses, states, exits, the first failure, the stop."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from lp_pipe.errors import NodeError, Unavailable
from lp_pipe.launch.directory import Directory, Settlement
from lp_pipe.launch.plan import Plan
from lp_pipe.launch.ports import Ports
from lp_pipe.launch.record import Failure, NodeRecord
from lp_pipe.launch.unit import Unit
from lp_pipe.launch.verdict import Verdict
from lp_pipe.telemetry.metrics import MetricsLog

_log = logging.getLogger(__name__)


class Order(NamedTuple):
    """What the coordinator wants done: `is_restart`: start these nodes again; else take them down."""

    is_restart: bool
    node_ids: Sequence[str]


class Coordinator:
    """Thread-safe; every method returns at once, so that any thread of a connection may call it.

    endpoint_of: where the owner of an address listens, by address id.
    """

    def __init__(self, plan: Plan, endpoint_of: Callable[[str], str], metrics: MetricsLog) -> None:
        self.plan = plan
        self._endpoint_of = endpoint_of
        self._metrics = metrics
        self._nodes = {spec.node_id: NodeRecord(spec) for spec in plan.nodes}
        self._units: dict[str, Unit] = {}  # by label/index
        for record in self._nodes.values():
            self._units.setdefault(record.spec.name, Unit([])).parts.append(record)
        self._directory = Directory()
        self._inner_ended: list[tuple[str, Future[str]]] = []  # who waits for the inner nodes of a colocation
        self._settled: list[Settlement] = []
        self._ports = Ports()
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self.stop_requested = False
        self._verdict = Verdict()
        self._restart_at: dict[str, float] = {}  # by node_id: nodes that are down for now (time.monotonic)
        self._to_take_down: list[str] = []
        self._hurry = False
        self._is_over = False

    # What nodes ask (through NodeServices).

    def endpoint_for(self, address: str) -> str:
        """Where the owner of the address listens.

        Raises:
            RuntimeError: no node of this program owns it.
        """
        if address not in self.plan.owners:
            raise RuntimeError(f"this handle's node is not in program {self.plan.program!r}, so it cannot be reached")
        return self._endpoint_of(address)

    def register(self, address: str, endpoint: str) -> None:
        with self._changing():
            self._settled += self._directory.register(address, endpoint)

    def withdraw(self, address: str) -> None:
        with self._lock:
            self._directory.withdraw([address])

    def resolve(self, address: str) -> "Future[str]":
        """The endpoint once it is registered; Unavailable once its node cannot register any more."""
        future: Future[str] = Future()
        with self._changing():
            outcome = self._resolved(address)
            if outcome is None:
                self._directory.wait(address, future)
            else:
                self._settled.append(Settlement(future, outcome))
        return future

    def inner_nodes_ended(self, colocation: str) -> "Future[str]":
        """Done once all inner nodes of a MultiProcessingColocation are down."""
        future: Future[str] = Future()
        with self._changing():
            self._inner_ended.append((colocation, future))
        return future

    def stop_inner_nodes(self, colocation: str) -> None:
        """Take the inner nodes of a MultiProcessingColocation down, and not the program."""
        with self._changing():
            self._end(self._inner_nodes(colocation))

    def reserve_port(self, address: str) -> str:
        """A "host:port" that nobody uses, the same for every asker."""
        if address not in self.plan.owners:
            raise RuntimeError("this address belongs to no node of the program: address.assign(node) before launch")
        return self._ports.reserve(address)

    def request_stop(self, hurry: bool = False) -> None:
        """Begin an ordered stop; `hurry` cuts its grace period short."""
        with self._changing():
            self.stop_requested = True
            self._hurry = self._hurry or hurry

    def log_metrics(self, node_id: str, values: Mapping[str, float], step: int | None) -> None:
        """Under the name of the node of the program, whichever part of it says so."""
        record = self._nodes.get(node_id)
        self._metrics.record(record.spec.name if record is not None else node_id, values, step)

    # What the hosts report.

    def node_started(self, node_id: str, pid: int) -> None:
        with self._changing():
            record = self._nodes[node_id]
            record.pid, record.started_at = pid, time.time()
            if record.state == "starting":  # the template's word may come after the node's own that it has ended
                record.state = "running"

    def node_ended(self, node_id: str, failure: Failure | None, can_restart: bool = True) -> None:
        """The node's code is done. The first word counts: a process's exit after it adds nothing."""
        with self._changing():
            record = self._nodes[node_id]
            if not record.is_alive and (can_restart or record.state != "restarting"):
                return
            news = self._conclude(record, failure, can_restart)
            self._withdraw_all(record)
        if news:  # not with the lock held: a handler of the user's may ask for the status
            _log.warning(news)

    def node_down(self, node_id: str) -> None:
        """Nothing of the node is left."""
        with self._changing():
            self._gone(self._nodes[node_id])

    def node_abandoned(self, node_id: str) -> None:
        """The node did not end in time and was left behind or killed."""
        with self._changing():
            record = self._nodes[node_id]
            if record.is_alive:
                is_restart = self._units[record.spec.name].is_restarting and not self.stop_requested
                record.state = "restarting" if is_restart else "stopped"
            self._gone(record)

    # What the run asks.

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """State, pid, last error and restarts of every node, by label."""
        with self._lock:
            table: dict[str, list[dict[str, Any]]] = {}
            for unit in self._units.values():
                table.setdefault(unit.spec.label, []).append(unit.row())
            return table

    def nodes_up(self) -> list[str]:
        """Names of the nodes of which something is left."""
        with self._lock:
            return [name for name, unit in self._units.items() if not all(part.is_down for part in unit.parts)]

    def main_part(self, name: str) -> str:
        """The node_id of what a node of the program is to be asked by: the part that failed, or its first."""
        with self._lock:
            first = self._verdict.first
            return first[0].node_id if first is not None and first[0].name == name else self._units[name].spec.node_id

    def is_running(self, node_id: str) -> bool:
        """Whether the node's code has not ended."""
        with self._lock:
            return self._nodes[node_id].is_alive

    def must_end(self, node_id: str) -> bool:
        """Whether the node was told to end, alone or with the whole program."""
        with self._lock:
            return self.stop_requested or self._nodes[node_id].is_ending

    def still_ending(self, node_ids: Iterable[str]) -> list[str]:
        """Those that were told to end and are not gone."""
        with self._lock:
            return [node_id for node_id in node_ids if self._nodes[node_id].is_ending]

    def wait_for_end(self, node_ids: Sequence[str], patience_s: float | None = None) -> bool:
        """Wait until those that were told to end are gone; False when the patience (or, in a hurry, none) is spent."""
        with self.changed:
            nodes = [self._nodes[node_id] for node_id in node_ids]
            is_impatient = patience_s is not None
            self.changed.wait_for(
                lambda: (self._hurry and is_impatient) or not any(node.is_ending for node in nodes), patience_s
            )
            return not any(node.is_ending for node in nodes)

    def next_order(self) -> Order | None:
        """Wait until something is to be done: a node that is due to be started again counts as starting from now on.

        None once the program must stop (somebody asked, or a node failed) or all nodes are down: take them all down.
        """
        with self._changing():
            while not (self.stop_requested or self._all_down()):
                if self._to_take_down:
                    node_ids, self._to_take_down = self._to_take_down, []
                    return Order(False, node_ids)
                due = min(self._restart_at, key=self._restart_at.__getitem__, default=None)
                if due is not None and self._restart_at[due] <= time.monotonic():
                    del self._restart_at[due]
                    self._nodes[due].start_again()
                    return Order(True, [due])
                if self._verdict.settle():
                    self.stop_requested = True
                else:
                    self.changed.wait(self._until_next_decision())
            self.stop_requested = self._verdict.settle(is_final=True) or self.stop_requested
            self._end_all()
        return None

    def finish(self) -> None:
        """The program is over: nobody will be found any more."""
        with self._changing():
            self._is_over = True
            self._settled += self._directory.give_all_up(f"program {self.plan.program!r} has ended")

    def why_gone(self) -> dict[str, str]:
        """For every address, by its id: why nobody listens there any more."""
        with self._lock:
            return {address: self._nodes[owner].why_gone for address, owner in self.plan.owners.items()}

    @property
    def later_failures(self) -> int:
        """How many failures came after the first one."""
        return self._verdict.later_failures

    def failure(self) -> NodeError | None:
        """The first failure, as `wait()` raises it."""
        if self._verdict.first is None:
            return None
        spec, failure = self._verdict.first
        return NodeError(spec.label, spec.index, failure.type_name, failure.message, failure.traceback)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for a change, then wake who waits for one; futures are settled when it is free again."""
        try:
            with self.changed:
                try:
                    yield
                finally:
                    self._settle_inner()
                    self.changed.notify_all()
                    settled, self._settled = self._settled, []
        finally:
            for settlement in settled:
                settlement.carry_out()

    # With the lock held.

    def _all_down(self) -> bool:
        return all(record.is_down for record in self._nodes.values())

    def _resolved(self, address: str) -> str | Exception | None:
        owner = self.plan.owners.get(address)
        if owner is None:
            return RuntimeError(f"this handle's node is not in program {self.plan.program!r}, so it cannot be reached")
        if (endpoint := self._directory.find(address)) is not None:
            return endpoint
        record = self._nodes[owner]
        if not record.may_register or self._is_over:
            return Unavailable(record.why_gone)
        return None

    def _conclude(self, record: NodeRecord, failure: Failure | None, can_restart: bool) -> str:
        """The state after the end of a node's code, by its group's policy; what the log should say of it."""
        unit = self._units[record.spec.name]
        record.error = failure or record.error
        may_restart = can_restart and not self.stop_requested
        if unit.is_restarting and may_restart:
            record.state = "restarting"
        elif failure is None or (record.is_ending and not self.stop_requested):
            record.state = "stopped" if self.stop_requested or record.is_ending else "finished"
        else:
            return self._fail(unit, record, failure, may_restart)
        return ""

    def _fail(self, unit: Unit, record: NodeRecord, failure: Failure, may_restart: bool) -> str:
        news = unit.news_of(record, failure, may_restart)
        others = [part for part in unit.parts if part is not record]
        if record.state == "restarting":
            if unit.is_restarting:
                self._restart_with(others)
            return news
        unit.is_restarting = False
        self._restart_at.pop(record.spec.node_id, None)
        if record.spec.on_failure == "ignore":
            self._end(others)
        elif self._verdict.judge(record.spec, failure, self.stop_requested):
            self.stop_requested = True
        return news

    def _restart_with(self, others: list[NodeRecord]) -> None:
        """The other parts of a failed node: those that have ended stay down, the rest ends, until all can start."""
        for part in others:
            self._restart_at.pop(part.spec.node_id, None)
            if not part.is_alive:
                part.state = "restarting"
        self._end([part for part in others if part.is_alive])

    def _end(self, parts: Iterable[NodeRecord]) -> None:
        """Have them taken down for good, or until their node restarts."""
        for part in parts:
            if part.is_gone:
                self._restart_at.pop(part.spec.node_id, None)
                self._put_down(part)
            elif not part.is_ending:
                part.is_ending = True
                if part.state == "restarting":
                    part.state = "stopped"
                self._to_take_down.append(part.spec.node_id)

    def _end_all(self) -> None:
        self._restart_at.clear()
        for unit in self._units.values():
            unit.is_restarting = False
            for part in unit.parts:
                part.is_ending = not part.is_gone
                if part.is_gone:
                    self._put_down(part)

    def _gone(self, record: NodeRecord) -> None:
        if record.is_gone:
            return
        if record.state != "restarting" or self.stop_requested:
            self._put_down(record)
            return
        record.is_gone, record.is_ending, record.pid = True, False, 0
        due, wait_s = self._units[record.spec.name].due_with(record)
        self._restart_at.update({part.spec.node_id: time.monotonic() + wait_s for part in due})

    def _put_down(self, record: NodeRecord) -> None:
        record.put_down()
        self._withdraw_all(record)

    def _withdraw_all(self, record: NodeRecord) -> None:
        """Forget where the node listened; those who wait for it in vain."""
        self._directory.withdraw(record.spec.addresses)
        if not record.may_register:
            self._settled += self._directory.give_up(record.spec.addresses, record.why_gone)

    def _inner_nodes(self, colocation: str) -> list[NodeRecord]:
        return [record for node_id, record in self._nodes.items() if node_id.startswith(f"{colocation}.")]

    def _settle_inner(self) -> None:
        ended = [item for item in self._inner_ended if all(record.is_down for record in self._inner_nodes(item[0]))]
        for item in ended:
            self._inner_ended.remove(item)
            self._settled.append(Settlement(item[1], ""))

    def _until_next_decision(self) -> float | None:
        times = [*self._restart_at.values(), *([self._verdict.due_at] if self._verdict.due_at is not None else [])]
        return max(0.0, min(times) - time.monotonic()) if times else None
