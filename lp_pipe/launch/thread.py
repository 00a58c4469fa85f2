"""Thread mode: every node is a thread of this process, and talks to the coordinator directly."""

import logging
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from lp_pipe.connections import inproc
from lp_pipe.context import NodeContext, NodeServices, entered
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.coordination.node_group import CallRate
from lp_pipe.launch.host import Host, give_up
from lp_pipe.launch.plan import interpreter_state
from lp_pipe.launch.plan.launch_plan import LaunchPlan
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.processes.compute_threads import unset_threads, use_threads
from lp_pipe.launch.processes.execute import run_node, run_setup
from lp_pipe.launch.services import LocalServices
from lp_pipe.launch.supervision.messages import Failure, View
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.telemetry.metrics import MetricsLog
from lp_pipe.telemetry.tracebacks import stack_of

_log = logging.getLogger(__name__)


def make_host(plan: LaunchPlan, metrics: MetricsLog) -> tuple[Host, Coordinator]:
    """Return a host that runs the nodes of `plan` as threads.

    Raises:
        ValueError: groups ask for different numbers of torch threads, of which a process has only one.
    """
    run = uuid.uuid4().hex  # the same program may run twice at a time
    prefix = inproc.own_endpoint(f"{run}/")  # now: asked in a forked child, it would name that process
    coordinator = Coordinator(plan, lambda address: prefix + address, metrics)
    return ThreadHost(plan, coordinator), coordinator


class ThreadHost(Host):
    """Runs the nodes of a plan as daemon threads."""

    def __init__(self, plan: LaunchPlan, coordinator: Coordinator) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._specs = {spec.node_id: spec for spec in plan.nodes}
        self._threads: dict[str, threading.Thread] = {}
        self._contexts: dict[str, NodeContext] = {}
        self._thread_count = common_threads(plan.nodes)
        self._uses_threads = False
        self._setup_failure: Failure | None = None
        self._prepare_thread: interpreter_state.ThreadState = lambda: None

    def start(self) -> None:
        use_threads(self._thread_count)
        self._uses_threads = True
        if self._plan.setup is not None:
            self._setup_failure = run_setup(self._plan.setup)
        self._prepare_thread = interpreter_state.thread_state()
        for spec in self._plan.nodes:
            self._prepare(spec)
        try:
            for thread in self._threads.values():
                thread.start()
        except RuntimeError:  # out of threads
            self.give_up()
            raise

    def give_up(self) -> None:
        never = [node_id for node_id in self._specs if node_id not in self._threads or not self._threads[node_id].ident]
        give_up(self._coordinator, never)

    def restart(self, node_id: str) -> None:
        # What is left of the failed one, threads of its own and handlers at work, must not wait for a stop for ever.
        self._contexts[node_id].stop_signal.set()
        self._prepare(self._specs[node_id])
        self._threads[node_id].start()

    def stop_nodes(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            if node_id in self._contexts:  # else nothing could be started
                self._contexts[node_id].stop_signal.set()

    def terminate(self, node_ids: Iterable[str]) -> None:
        """Threads cannot be asked any harder than by their stop event."""

    def kill(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            thread = self._threads[node_id]
            _log.warning("node %s is left behind as a daemon thread. It is at:\n%s", node_id, stack_of(thread))
            self._coordinator.node_down(node_id)

    def suspend(self) -> Callable[[], object]:
        return lambda: None  # they stop with this process, and go on with it

    def close(self) -> None:
        if self._uses_threads:
            unset_threads()

    def stacks(self) -> str:
        frames = sys._current_frames()
        parts = []
        services = [node.services for node in self._contexts.values()]  # shared by the nodes inside a colocation
        for thread in threading.enumerate():
            node = getattr(thread, "_lp_pipe_context", None)
            name = thread.name if thread in self._threads.values() else None
            owner = name or (node.name if node is not None and node.services in services else None)
            if owner is not None and thread.ident in frames:
                parts.append(f"node {owner}, thread {thread.name}:\n" + stack_of(thread))
        return "\n".join(parts)

    def dying(self) -> Mapping[str, int]:
        return {}  # the ends of threads are reported at once

    def look(self, old_s: float) -> list[View]:
        return []  # they are in the process that asks, which looks at itself

    def nodes_here(self) -> Mapping[NodeServices, str]:
        return {node.services: node_id for node_id, node in list(self._contexts.items())}

    def inject(self, fault: wire.Fault) -> "Mapping[str, Future[int]]":
        return {}  # as `look`

    def set_tracing(self, is_on: bool) -> None:
        return None  # they are in the process that asks, which records by itself

    def clock_offset(self, host: str) -> float:
        return 0.0

    def where(self, node_id: str) -> str:
        return socket.gethostname()

    def last_lines(self, node_id: str) -> list[str]:
        return []  # they print to the streams of this process

    def log_path(self, node_id: str) -> Path | None:
        return None

    def _prepare(self, spec: NodeSpec) -> None:
        node = NodeContext(
            label=spec.label,
            index=spec.index,
            group_size=spec.group_size,
            resources=spec.resources,
            run_dir=self._plan.run_dir,
            services=LocalServices(self._coordinator, spec.node_id),
            grace_s=self._plan.grace_s,
            prepare_thread=self._prepare_thread,
        )
        self._contexts[spec.node_id] = node
        self._threads[spec.node_id] = threading.Thread(
            target=self._run, args=(spec, node), name=spec.node_id, daemon=True
        )

    def _run(self, spec: NodeSpec, node: NodeContext) -> None:
        self._coordinator.node_started(spec.node_id, os.getpid(), CallRate(lambda: node.calls))
        with entered(node):
            node.prepare_thread()
            failure = self._setup_failure or run_node(spec.node, node)
        if self._contexts[spec.node_id] is not node:
            return  # it was left behind, and another thread is this node by now
        self._coordinator.node_ended(spec.node_id, failure)
        self._coordinator.node_down(spec.node_id)


def common_threads(nodes: Iterable[NodeSpec]) -> int:
    """Return the number of torch threads that all these nodes want.

    Raises:
        ValueError: they want different ones.
    """
    values = {spec.resources.threads: spec.node_id for spec in nodes}
    if len(values) > 1:
        asked = ", ".join(f"{name} wants {count}" for count, name in values.items())
        raise ValueError(
            f"thread mode has one number of torch threads for the whole program, but {asked}; "
            "give all groups the same Resources(threads=...), or use mode='process'"
        )
    return next(iter(values), 1)
