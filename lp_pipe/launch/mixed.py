"""Thread mode with some nodes that are processes: the inner ones of a MultiProcessingColocation, as in every mode."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from lp_pipe.connections import same_host, unix
from lp_pipe.context import NodeServices
from lp_pipe.launch import thread
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host
from lp_pipe.launch.plan.launch_plan import LaunchPlan, serialize_nodes
from lp_pipe.launch.plan.placement import Placement
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.process import ProcessHost
from lp_pipe.launch.supervision.messages import View
from lp_pipe.launch.thread import ThreadHost, common_threads
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.telemetry.metrics import MetricsLog


def make_host(plan: LaunchPlan, metrics: MetricsLog) -> tuple[Host, Coordinator]:
    """Return a host that runs the nodes of `plan` as threads, inner nodes of MultiProcessingColocations as processes.

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
    # The processes first: they fail more often, and no node has begun then.
    threads = {spec.node_id for spec in outer.nodes}
    return CompositeHost({process_host: inner, ThreadHost(outer, coordinator): threads}), coordinator


class CompositeHost(Host):
    """Several hosts that run the nodes of one program together.

    nodes: the node_ids that each host runs. The hosts start in this order and close in it.
    """

    def __init__(self, nodes: Mapping[Host, Collection[str]]) -> None:
        self._hosts = tuple(nodes)
        self._host_of = {node_id: host for host, node_ids in nodes.items() for node_id in node_ids}

    # Of all hosts.

    def start(self) -> None:
        waiting = list(self._hosts)
        try:
            while waiting:
                host = waiting.pop(0)
                host.start()
                self.socket_dir, self.mark = self.socket_dir or host.socket_dir, self.mark or host.mark
        except BaseException:  # the host that has failed gave up its own nodes
            for host in waiting:
                host.give_up()
            raise

    def give_up(self) -> None:
        for host in self._hosts:
            host.give_up()

    def suspend(self) -> Callable[[], object] | None:
        with contextlib.ExitStack() as resuming:
            for host in self._hosts:
                resume = host.suspend()
                if resume is None:
                    return None  # those that were suspended go on
                resuming.callback(resume)
            return resuming.pop_all().close

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for host in reversed(self._hosts):
                closing.callback(host.close)

    def stacks(self) -> str:
        return "\n".join(host.stacks() for host in self._hosts)

    def dying(self) -> Mapping[str, int]:
        return {node_id: pid for host in self._hosts for node_id, pid in host.dying().items()}

    def look(self, old_s: float) -> list[View]:
        return [view for host in self._hosts for view in host.look(old_s)]

    def nodes_here(self) -> Mapping[NodeServices, str]:
        return {services: node_id for host in self._hosts for services, node_id in host.nodes_here().items()}

    def inject(self, fault: wire.Fault) -> "Mapping[str, Future[int]]":
        return {node_id: answer for host in self._hosts for node_id, answer in host.inject(fault).items()}

    def set_tracing(self, is_on: bool) -> None:
        for host in self._hosts:
            host.set_tracing(is_on)

    def clock_offset(self, host: str) -> float:
        return 0.0  # they are all on this one

    # Of the hosts that run these nodes.

    def stop_nodes(self, node_ids: Iterable[str]) -> None:
        for host, part in self._by_host(node_ids):
            host.stop_nodes(part)

    def terminate(self, node_ids: Iterable[str]) -> None:
        for host, part in self._by_host(node_ids):
            host.terminate(part)

    def kill(self, node_ids: Iterable[str]) -> None:
        for host, part in self._by_host(node_ids):
            host.kill(part)

    # Of the host that runs this node.

    def restart(self, node_id: str) -> None:
        self._host_of[node_id].restart(node_id)

    def where(self, node_id: str) -> str:
        return self._host_of[node_id].where(node_id)

    def last_lines(self, node_id: str) -> list[str]:
        return self._host_of[node_id].last_lines(node_id)

    def log_path(self, node_id: str) -> Path | None:
        return self._host_of[node_id].log_path(node_id)

    def _by_host(self, node_ids: Iterable[str]) -> Iterable[tuple[Host, list[str]]]:
        parts: dict[Host, list[str]] = {}
        for node_id in node_ids:
            parts.setdefault(self._host_of[node_id], []).append(node_id)
        return parts.items()


def _part(plan: LaunchPlan, belongs: Callable[[NodeSpec], bool]) -> LaunchPlan:
    return dataclasses.replace(plan, nodes=tuple(spec for spec in plan.nodes if belongs(spec)))
