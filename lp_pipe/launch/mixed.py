"""Thread mode, in which some nodes are processes: the inner ones of a MultiProcessingColocation, as in every mode."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from lp_pipe.connections import same_host, unix
from lp_pipe.context import NodeServices
from lp_pipe.launch import thread
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.coordination.view import View
from lp_pipe.launch.host import Host
from lp_pipe.launch.plan.launch_plan import LaunchPlan, serialize_nodes
from lp_pipe.launch.plan.placement import Placement
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.process import ProcessHost
from lp_pipe.launch.thread import ThreadHost, common_threads
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.telemetry.metrics import MetricsLog


def make_host(plan: LaunchPlan, metrics: MetricsLog) -> tuple[Host, Coordinator]:
    """A host that runs the nodes of `plan` as threads, inner nodes of MultiProcessingColocations as processes.

    Raises:
        ValueError: groups ask for different numbers of torch threads, of which a process has only one.
        SerializationError: a node that is a process cannot be sent there.
    """
    inner = {spec.node_id for spec in plan.nodes if spec.is_inner}
    if not inner:
        return thread.make_host(plan, metrics)
    outer = _part(plan, lambda spec: not spec.is_inner)
    common_threads(outer.nodes)
    processes = _part(plan, lambda spec: spec.is_inner)
    payloads = serialize_nodes(processes)

    def endpoint_of(address: str) -> str:
        scheme = unix.SCHEME if plan.owners[address] in inner else same_host.SCHEME
        return f"{scheme}{process_host.socket_dir}/{address}"

    coordinator = Coordinator(plan, endpoint_of, metrics)
    # Pinned to no cores and given no GPUs of their own: in thread mode nothing is handed out.
    process_host = ProcessHost(processes, coordinator, payloads, dict.fromkeys(inner, Placement()))
    if not outer.nodes:
        return process_host, coordinator
    return MixedHost(ThreadHost(outer, coordinator), process_host, inner), coordinator


class MixedHost(Host):
    """Threads and processes of one program; `inner`: the node_ids of the processes."""

    def __init__(self, threads: ThreadHost, processes: ProcessHost, inner: set[str]) -> None:
        self._threads = threads
        self._processes = processes
        self._inner = inner

    def start(self) -> None:
        try:
            self._processes.start()  # first: this fails more often, and nothing has begun then
        except BaseException:
            self._threads.give_up()
            raise
        self.socket_dir, self.mark = self._processes.socket_dir, self._processes.mark
        self._threads.start()

    def restart(self, node_id: str) -> None:
        self._host_of(node_id).restart(node_id)

    def stop_nodes(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            self._host_of(node_id).stop_nodes([node_id])

    def terminate(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            self._host_of(node_id).terminate([node_id])

    def kill(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            self._host_of(node_id).kill([node_id])

    def close(self) -> None:
        self._processes.close()
        self._threads.close()

    def stacks(self) -> str:
        return f"{self._threads.stacks()}\n{self._processes.stacks()}"

    def dying(self) -> Mapping[str, int]:
        return self._processes.dying()

    def look(self, old_s: float) -> list[View]:
        return self._processes.look(old_s)

    def nodes_here(self) -> Mapping[NodeServices, str]:
        return self._threads.nodes_here()

    def inject(self, fault: wire.Fault) -> "Mapping[str, Future[int]]":
        return self._processes.inject(fault)

    def last_lines(self, node_id: str) -> list[str]:
        return self._host_of(node_id).last_lines(node_id)

    def log_path(self, node_id: str) -> Path | None:
        return self._host_of(node_id).log_path(node_id)

    def _host_of(self, node_id: str) -> Host:
        return self._processes if node_id in self._inner else self._threads


def _part(plan: LaunchPlan, belongs: Callable[[NodeSpec], bool]) -> LaunchPlan:
    return dataclasses.replace(plan, nodes=tuple(spec for spec in plan.nodes if belongs(spec)))
