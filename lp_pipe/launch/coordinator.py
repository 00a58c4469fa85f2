"""The one place that knows the whole program: addresses, states, exits, the first failure, the stop."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from lp_pipe.errors import NodeError, Unavailable
from lp_pipe.launch.plan import NodeSpec, Plan
from lp_pipe.launch.ports import Ports
from lp_pipe.launch.record import Failure, NodeRecord
from lp_pipe.launch.verdict import Verdict
from lp_pipe.telemetry.metrics import MetricsLog

_log = logging.getLogger(__name__)


class Coordinator:
    """Thread-safe; every method returns at once, so that any thread of a connection may call it.

    endpoint_of: where the owner of an address listens, by address id.
    """

    def __init__(self, plan: Plan, endpoint_of: Callable[[str], str], metrics: MetricsLog) -> None:
        self.plan = plan
        self._endpoint_of = endpoint_of
        self._metrics = metrics
        self._nodes = {spec.node_id: NodeRecord(spec) for spec in plan.nodes}
        self._endpoints: dict[str, str] = {}
        self._waiting: dict[str, list[Future[str]]] = {}
        self._ports = Ports()
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self.stop_requested = False
        self._verdict = Verdict()
        self._restart_at: dict[str, float] = {}  # by node_id: nodes that are down for now (time.monotonic)
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
        with self._lock:
            self._endpoints[address] = endpoint
            waiting = self._waiting.pop(address, [])
        for future in waiting:
            _settle(future, endpoint)

    def withdraw(self, address: str) -> None:
        with self._lock:
            self._endpoints.pop(address, None)

    def resolve(self, address: str) -> "Future[str]":
        """The endpoint once it is registered; Unavailable once its node cannot register any more."""
        future: Future[str] = Future()
        with self._lock:
            outcome = self._resolved(address)
            if outcome is None:
                self._waiting.setdefault(address, []).append(future)
        if outcome is not None:
            _settle(future, outcome)
        return future

    def reserve_port(self, address: str) -> str:
        """A "host:port" that nobody uses, the same for every asker."""
        if address not in self.plan.owners:
            raise RuntimeError("this address belongs to no node of the program: address.assign(node) before launch")
        return self._ports.reserve(address)

    def request_stop(self, hurry: bool = False) -> None:
        """Begin an ordered stop; `hurry` cuts its grace period short."""
        with self.changed:
            self.stop_requested = True
            self._hurry = self._hurry or hurry
            self.changed.notify_all()

    def log_metrics(self, node_id: str, values: Mapping[str, float], step: int | None) -> None:
        self._metrics.record(node_id, values, step)

    # What the hosts report.

    def node_started(self, node_id: str, pid: int) -> None:
        with self.changed:
            record = self._nodes[node_id]
            record.pid, record.started_at = pid, time.time()
            if record.state == "starting":  # the template's word may come after the node's own that it has ended
                record.state = "running"
            self.changed.notify_all()

    def node_ended(self, node_id: str, failure: Failure | None, can_restart: bool = True) -> None:
        """The node's code is done. The first word counts: a process's exit after it adds nothing."""
        with self.changed:
            record = self._nodes[node_id]
            if not record.is_alive and (can_restart or record.state != "restarting"):
                return
            news = self._conclude(record, failure, can_restart)
            orphans = self._withdraw_all(record)
            self.changed.notify_all()
        if news:  # not with the lock held: a handler of the user's may ask for the status
            _log.warning(news)
        _settle_all(orphans)

    def node_down(self, node_id: str) -> None:
        """Nothing of the node is left."""
        with self.changed:
            record = self._nodes[node_id]
            if record.state == "restarting" and not self.stop_requested:
                record.pid = 0
                self._restart_at[node_id] = time.monotonic() + record.backoff_s
                orphans = []
            else:
                orphans = self._put_down(record)
            self.changed.notify_all()
        _settle_all(orphans)

    def node_abandoned(self, node_id: str) -> None:
        """The node did not end in time and was left behind or killed."""
        with self.changed:
            record = self._nodes[node_id]
            if record.is_alive:
                record.state = "stopped"
            orphans = self._put_down(record)
            self.changed.notify_all()
        _settle_all(orphans)

    # What the run asks.

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """State, pid, last error and restarts of every node, by label."""
        with self._lock:
            table: dict[str, list[dict[str, Any]]] = {}
            for record in self._nodes.values():
                error = record.error
                row = {
                    "state": record.state,
                    "pid": record.pid,
                    "error": error.summary if error else None,
                    "uptime_s": round(time.time() - record.started_at, 1) if record.state == "running" else None,
                    "restarts": record.restarts,
                }
                table.setdefault(record.spec.label, []).append(row)
            return table

    def nodes_up(self) -> list[NodeSpec]:
        """Nodes of which something is left."""
        with self._lock:
            return [record.spec for record in self._nodes.values() if not record.is_down]

    def is_running(self, node_id: str) -> bool:
        """Whether the node's code has not ended."""
        with self._lock:
            return self._nodes[node_id].is_alive

    def wait_for_end(self, patience_s: float) -> bool:
        """Wait until every node is down; False when the patience (or, in a hurry, none) is spent before."""
        with self.changed:
            self.changed.wait_for(lambda: self._hurry or self._all_down(), patience_s)
            return self._all_down()

    def wait_until_down(self) -> None:
        """Wait until every node is down."""
        with self.changed:
            self.changed.wait_for(self._all_down)

    def next_restart(self) -> str | None:
        """Wait until a node is due to be started again: its id, and from now on it counts as starting.

        None once the program must stop (somebody asked, or a node failed) or all nodes are down: no more restarts.
        """
        with self.changed:
            while not (self.stop_requested or self._all_down()):
                due = min(self._restart_at, key=self._restart_at.__getitem__, default=None)
                if due is not None and self._restart_at[due] <= time.monotonic():
                    del self._restart_at[due]
                    self._nodes[due].state = "starting"
                    return due
                if self._verdict.settle():
                    self.stop_requested = True
                else:
                    self.changed.wait(self._until_next_decision())
            self.stop_requested = self._verdict.settle(is_final=True) or self.stop_requested
            orphans = [orphan for node_id in self._restart_at for orphan in self._put_down(self._nodes[node_id])]
            self._restart_at.clear()
            self.changed.notify_all()
        _settle_all(orphans)
        return None

    def finish(self) -> None:
        """The program is over: nobody will be found any more."""
        with self._lock:
            self._is_over = True
            waiting = [future for futures in self._waiting.values() for future in futures]
            self._waiting.clear()
        for future in waiting:
            _settle(future, Unavailable(f"program {self.plan.program!r} has ended"))

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

    # With the lock held.

    def _all_down(self) -> bool:
        return all(record.is_down for record in self._nodes.values())

    def _resolved(self, address: str) -> str | Exception | None:
        owner = self.plan.owners.get(address)
        if owner is None:
            return RuntimeError(f"this handle's node is not in program {self.plan.program!r}, so it cannot be reached")
        if address in self._endpoints:
            return self._endpoints[address]
        record = self._nodes[owner]
        if not record.may_register or self._is_over:
            return Unavailable(record.why_gone)
        return None

    def _conclude(self, record: NodeRecord, failure: Failure | None, can_restart: bool) -> str:
        """The state after the end of a node's code, by its group's policy; what the log should say of it."""
        if failure is None:
            record.state = "stopped" if self.stop_requested else "finished"
            return ""
        record.error = failure
        news = f"node {record.spec.node_id} failed: {failure.summary}"
        if can_restart and record.may_restart and not self.stop_requested:
            record.state = "restarting"
            record.restarts += 1
            return f"{news}; restart {record.restarts} of {record.spec.max_restarts} in {record.backoff_s:g} s"
        record.state = "failed"
        self._restart_at.pop(record.spec.node_id, None)
        if record.spec.on_failure == "ignore":
            return f"{news}; the program goes on without it (on_failure='ignore')"
        if self._verdict.judge(record.spec, failure, self.stop_requested):
            self.stop_requested = True
        return ""

    def _put_down(self, record: NodeRecord) -> "list[_Orphan]":
        if record.state == "restarting":
            record.state = "stopped"
        record.is_down = True
        return self._withdraw_all(record)

    def _withdraw_all(self, record: NodeRecord) -> "list[_Orphan]":
        """Forget where the node listened; those who wait for it in vain."""
        mine = [address.id for address in record.spec.node.addresses]
        for address in mine:
            self._endpoints.pop(address, None)
        if record.may_register:
            return []
        return [(future, record.why_gone) for address in mine for future in self._waiting.pop(address, [])]

    def _until_next_decision(self) -> float | None:
        times = [*self._restart_at.values(), *([self._verdict.due_at] if self._verdict.due_at is not None else [])]
        return max(0.0, min(times) - time.monotonic()) if times else None


_Orphan = tuple["Future[str]", str]


def _settle_all(orphans: list[_Orphan]) -> None:
    for future, reason in orphans:
        _settle(future, Unavailable(reason))


def _settle(future: "Future[str]", outcome: str | Exception) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, str):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
