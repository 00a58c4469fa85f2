"""The one place that knows the whole program: addresses, states, exits, the first failure, the stop."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lp_pipe.errors import NodeError, Unavailable
from lp_pipe.launch.plan import NodeSpec, Plan
from lp_pipe.telemetry.metrics import MetricsLog

# An Unavailable is mostly the echo of another node's death, whose news may come a moment later: wait so long for it.
# A killed process is reported after 1 s at the latest (its last frames, its last lines).
ECHO_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Failure:
    """How a node failed. `is_unavailable`: maybe only the echo of another node's end."""

    type_name: str
    message: str
    traceback: str = ""
    is_unavailable: bool = False


@dataclass
class NodeRecord:
    """One node's life: starting -> running -> finished | failed | stopped."""

    spec: NodeSpec
    state: str = "starting"
    pid: int = 0
    error: Failure | None = None
    started_at: float = 0.0
    is_down: bool = False
    waiters: list["Future[str]"] = field(default_factory=list)


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
        self._ports: dict[str, str] = {}
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self.stop_requested = False
        self.first_failure: tuple[NodeSpec, Failure] | None = None
        self.later_failures = 0
        self._echo: tuple[float, NodeSpec, Failure] | None = None
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
        with self._lock:
            if address not in self.plan.owners:
                raise RuntimeError("this address belongs to no node of the program: address.assign(node) before launch")
            if address not in self._ports:
                self._ports[address] = f"127.0.0.1:{_free_port(set(self._ports.values()))}"
            return self._ports[address]

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

    def node_ended(self, node_id: str, failure: Failure | None) -> None:
        """The node's code is done. The first word counts: a process's exit after it adds nothing."""
        with self.changed:
            record = self._nodes[node_id]
            if record.state not in ("starting", "running"):
                return
            if failure is None:
                record.state = "stopped" if self.stop_requested else "finished"
            else:
                record.state, record.error = "failed", failure
                self._judge(record.spec, failure)
            orphans = self._orphaned_waiters(record)
            self.changed.notify_all()
        for future, reason in orphans:
            _settle(future, Unavailable(reason))

    def node_down(self, node_id: str) -> None:
        """Nothing of the node is left."""
        with self.changed:
            self._nodes[node_id].is_down = True
            self.changed.notify_all()

    def node_abandoned(self, node_id: str) -> None:
        """The node did not end in time and was left behind or killed."""
        with self.changed:
            record = self._nodes[node_id]
            if record.state in ("starting", "running"):
                record.state = "stopped"
            record.is_down = True
            self.changed.notify_all()

    # What the run asks.

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """State, pid and error of every node, by label."""
        with self._lock:
            table: dict[str, list[dict[str, Any]]] = {}
            for record in self._nodes.values():
                error = record.error
                row = {
                    "state": record.state,
                    "pid": record.pid,
                    "error": f"{error.type_name}: {error.message}" if error else None,
                    "uptime_s": round(time.time() - record.started_at, 1) if record.state == "running" else None,
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
            return self._nodes[node_id].state in ("starting", "running")

    def wait_for_end(self, patience_s: float) -> bool:
        """Wait until every node is down; False when the patience (or, in a hurry, none) is spent before."""
        with self.changed:
            self.changed.wait_for(lambda: self._hurry or self._all_down(), patience_s)
            return self._all_down()

    def wait_until_down(self) -> None:
        """Wait until every node is down."""
        with self.changed:
            self.changed.wait_for(self._all_down)

    def wait_for_stop_or_end(self) -> None:
        """Wait until the program must stop (somebody asked, or a node failed), or all nodes are down."""
        with self.changed:
            while not (self.stop_requested or self._all_down()):
                self._judge_echo()
                if not self.stop_requested:
                    self.changed.wait(None if self._echo is None else max(0.0, self._echo[0] - time.monotonic()))
            self._judge_echo(is_final=True)

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
            return {address: _why_gone(self._nodes[owner]) for address, owner in self.plan.owners.items()}

    def failure(self) -> NodeError | None:
        """The first failure, as `wait()` raises it."""
        if self.first_failure is None:
            return None
        spec, failure = self.first_failure
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
        if record.state not in ("starting", "running") or self._is_over:
            return Unavailable(_why_gone(record))
        return None

    def _orphaned_waiters(self, record: NodeRecord) -> list[tuple["Future[str]", str]]:
        orphans = []
        for address, owner in self.plan.owners.items():
            if owner == record.spec.node_id:
                self._endpoints.pop(address, None)
                orphans += [(future, _why_gone(record)) for future in self._waiting.pop(address, [])]
        return orphans

    def _judge(self, spec: NodeSpec, failure: Failure) -> None:
        if self.first_failure is not None or self.stop_requested:
            self.later_failures += 1
        elif failure.is_unavailable:
            if self._echo is None:
                self._echo = (time.monotonic() + ECHO_PATIENCE_S, spec, failure)
        else:
            self.later_failures += self._echo is not None
            self.first_failure = (spec, failure)
            self.stop_requested = True

    def _judge_echo(self, is_final: bool = False) -> None:
        if self._echo is None or self.first_failure is not None:
            return
        when, spec, failure = self._echo
        if is_final or time.monotonic() >= when:
            self._echo = None
            self.first_failure = (spec, failure)
            self.stop_requested = True


def _why_gone(record: NodeRecord) -> str:
    name = record.spec.node_id
    if record.error is not None:
        return f"node {name} failed: {record.error.type_name}: {record.error.message}"
    return f"node {name} has {record.state}: it serves no more"


def _settle(future: "Future[str]", outcome: str | Exception) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, str):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _free_port(taken: Iterable[str]) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if f"127.0.0.1:{port}" not in taken:
            return port
