"""Multi-host mode: an agent on every host does there what process mode does here; one coordinator knows all of them."""

import contextlib
import functools
import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import ModuleType
from typing import Any

from lp_pipe.connections import run_endpoints
from lp_pipe.connections.credentials import generate_credentials
from lp_pipe.context import NodeServices
from lp_pipe.errors import LaunchError, Unavailable
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host, give_up
from lp_pipe.launch.hosts import agent_messages
from lp_pipe.launch.hosts.agent_messages import KillNodes, StartNodes, StopNodes, TerminateNodes, without_code
from lp_pipe.launch.hosts.host_files import send_tree, ship_local_modules, stop_shipping, warn_of_hosts_apart
from lp_pipe.launch.hosts.host_join import MultiHostOptions, RemoteAgent
from lp_pipe.launch.hosts.joined_hosts import JoinedHosts, join_hosts
from lp_pipe.launch.hosts.relocation import Relocation, orphan_s
from lp_pipe.launch.hosts.shipped_logs import ReceivedLogs
from lp_pipe.launch.hosts.source_tree import SourceTree
from lp_pipe.launch.plan.host_placement import offered
from lp_pipe.launch.plan.launch_plan import LaunchPlan, serialize_nodes
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.plan.surroundings import Surroundings
from lp_pipe.launch.processes.template import loaded_here
from lp_pipe.launch.supervision.messages import InjectFault, Notice, ReservePort, SetTracing, Stacks, View
from lp_pipe.launch.supervision.peer import Handlers
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.telemetry.log_files import LogFiles
from lp_pipe.telemetry.metrics import MetricsLog
from lp_pipe.telemetry.terminal_lines import Unfinished

_log = logging.getLogger(__name__)

_START_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.1
_STACKS_PATIENCE_S = 5.0
_CLOSE_PATIENCE_S = 8.0
_CLOCK_PATIENCE_S, _CLOCK_READINGS = 1.0, 5


def make_host(plan: LaunchPlan, metrics: MetricsLog, options: MultiHostOptions) -> tuple[Host, Coordinator]:
    """Return a host that runs each node of `plan` on one of the engine's hosts, once these have joined.

    Raises:
        SerializationError: a node, or the plan's setup, cannot be sent to its process.
        LaunchError: a host has not joined.
        ValueError: the hosts do not have what a group wants.
    """
    shipped = ship_local_modules(options.tree.root if options.tree else "")
    try:
        payloads = serialize_nodes(plan)
        surroundings = Surroundings.capture(options.tree.root if options.tree else "")
        credentials = options.kept.credentials if options.kept is not None else generate_credentials()
        joined = join_hosts(plan, options, credentials)
    except BaseException:
        stop_shipping(shipped)
        raise
    run = uuid.uuid4().hex

    def reserve_port(address: str) -> "Future[str]":
        return joined.agents[host.where(plan.owner_of(address))].ask(ReservePort(address))

    coordinator = Coordinator(plan, lambda address: run_endpoints.name_of(run, address), metrics, reserve_port)
    silence_s = joined.host_join.patience.silence_s
    run_endpoints.join(run_endpoints.RunMember(run, "the launcher", credentials, coordinator.find, silence_s=silence_s))
    coordinator.wait_for_room(payloads.keys() - joined.places.keys())
    host = MultiHost(run, plan, coordinator, payloads, joined, shipped, options.tree, surroundings)
    return host, coordinator


class MultiHost(Host):
    """The hosts of an engine: passes everything on to their agents, and is told of their losses."""

    def __init__(
        self,
        run: str,
        plan: LaunchPlan,
        coordinator: Coordinator,
        payloads: Mapping[str, bytes],
        joined: JoinedHosts,
        shipped: list[ModuleType],
        tree: SourceTree | None,
        surroundings: Surroundings,
    ) -> None:
        self._run = run
        self._plan = plan
        self._coordinator = coordinator
        self._payloads = payloads
        self._joined = joined
        self._relocation = Relocation(
            plan.nodes, joined.hardware, joined.places, coordinator, only_spares=joined.is_elastic
        )
        self._shipped = shipped
        self._tree = tree
        self._surroundings = surroundings
        self._agents = dict(joined.agents)
        self._views: dict[str, tuple[float, list[View]]] = {}
        self._log_files = LogFiles(plan.folder, [spec.node_id for spec in plan.nodes])
        self._logs = ReceivedLogs(self._log_files)
        self._past_hits: Counter[str] = Counter()  # of faults, at hosts that are closed
        self._is_traced = False
        self._is_closing = False
        self._lock = threading.Lock()

    def start(self) -> None:
        agents, nodes = self._up(), self._nodes_by_host()  # hosts may be lost meanwhile
        for agent in agents.values():
            agent.handle = _handlers(self._coordinator, self._logs, agent)
        for name in agents:
            self._coordinator.note_event("membership", host=name, change="joined")
        self._joined.host_join.tell_of_changes(self._on_lost, self._on_joined)
        try:
            if self._tree is not None:
                send_tree(self._tree, agents, is_up=lambda name: name in self._up())
            warn_of_hosts_apart(self._plan.run_dir, {name: agent for name, agent in agents.items() if nodes[name]})
            started = {name: agent.ask(self._start_message(nodes[name])) for name, agent in agents.items()}
            wait_for(started.values(), _START_PATIENCE_S)
            for name, done in started.items():
                self._check_start(name, done)
        except BaseException:
            self.give_up()
            raise
        again = [spec.node_id for spec in self._plan.nodes if spec.may_start_again or spec.least_started]
        self._payloads = {node_id: self._payloads[node_id] for node_id in again}  # the others: their agents have them

    def give_up(self) -> None:
        give_up(self._coordinator, self._payloads)  # also those that have started: `close` ends them

    def restart(self, node_id: str) -> None:
        if self._relocation.is_fenced(node_id):
            return
        with contextlib.suppress(Unavailable):  # its host is lost: `_on_lost` sees to its nodes
            self._ask_to_start(node_id).result(_START_PATIENCE_S)

    def stop_nodes(self, node_ids: Iterable[str]) -> None:
        node_ids = list(node_ids)
        self._tell(StopNodes, node_ids)
        self._relocation.give_up(node_ids)

    def terminate(self, node_ids: Iterable[str]) -> None:
        self._tell(TerminateNodes, node_ids)

    def kill(self, node_ids: Iterable[str]) -> None:
        self._tell(KillNodes, node_ids)

    def suspend(self) -> None:
        return None  # its agents would take it for dead

    def close(self) -> None:
        self._is_closing = True
        self._relocation.close()
        closing = [agent.ask(agent_messages.CloseNodes()) for agent in self._up().values()]
        for answer in wait_for(closing, _CLOSE_PATIENCE_S).done:
            with contextlib.suppress(Unavailable, LaunchError):  # it is gone, with all that it knew
                self._past_hits.update(answer.result())
        self._joined.host_join.release(patience_s=_CLOSE_PATIENCE_S / 2)
        self._logs.close()
        run_endpoints.leave(self._run)
        stop_shipping(self._shipped)

    def stacks(self) -> str:
        asked = {name: agent.ask(Stacks()) for name, agent in self._up().items()}
        wait_for(asked.values(), _STACKS_PATIENCE_S)
        return "\n".join(f"host {name}\n{_text_of(answer)}" for name, answer in asked.items())

    def dying(self) -> Mapping[str, int]:
        return {}  # each agent waits for the ends of its own

    def look(self, old_s: float) -> list[View]:
        for name, agent in self._up().items():
            agent.ask(agent_messages.LookAtNodes(old_s)).add_done_callback(functools.partial(self._note_views, name))
        now = time.monotonic()
        with self._lock:
            return [
                view._replace(silence_s=view.silence_s + now - when)
                for when, views in self._views.values()
                for view in views
            ]

    def nodes_here(self) -> Mapping[NodeServices, str]:
        return {}

    def inject(self, fault: wire.Fault) -> "Mapping[str, Future[int]]":
        message = InjectFault(fault.SerializeToString())
        past: Future[int] = Future()
        past.set_result(self._past_hits[fault.rule])
        asked = {name: _zero_if_gone(agent.ask(message)) for name, agent in self._up().items()}
        return {**{f"of host {name}": answer for name, answer in asked.items()}, "": past}

    def set_tracing(self, is_on: bool) -> None:
        self._is_traced = is_on
        for agent in self._up().values():
            agent.tell_if_open(SetTracing(is_on))

    def clock_offset(self, host: str) -> float:
        """Ask the host's agent for its time; the answer that came fastest is the most exact."""
        found = [(math.inf, 0.0)]
        with contextlib.suppress(Unavailable, KeyError, TimeoutError):
            for _ in range(_CLOCK_READINGS):
                asked = time.monotonic()
                theirs = self._up()[host].ask(agent_messages.ReadClock()).result(_CLOCK_PATIENCE_S)
                answered = time.monotonic()
                found.append((answered - asked, (asked + answered) / 2 - theirs))
        return min(found)[1]

    def where(self, node_id: str) -> str:
        return self._relocation.host_of(node_id)

    def last_lines(self, node_id: str) -> list[str]:
        return self._logs.last_lines(node_id)

    def log_path(self, node_id: str) -> Path | None:
        return self._log_files.path(node_id)

    def _nodes_by_host(self) -> dict[str, list[NodeSpec]]:
        nodes: dict[str, list[NodeSpec]] = {name: [] for name in self._joined.agents}
        for spec in self._plan.nodes:
            if host := self.where(spec.node_id):
                nodes[host].append(spec)
        return nodes

    def _start_message(self, nodes: Sequence[NodeSpec]) -> StartNodes:
        return StartNodes(
            run=self._run,
            program=self._plan.program,
            nodes=without_code(nodes),
            payloads={spec.node_id: self._payloads[spec.node_id] for spec in nodes},
            places={spec.node_id: self._relocation.place_of(spec.node_id).place for spec in nodes},
            run_dir=str(self._plan.run_dir),
            grace_s=self._plan.grace_s,
            surroundings=self._surroundings,
            preload=tuple(loaded_here()),
            orphan_s=orphan_s(self._plan.nodes, self._joined.is_elastic),
            silence_s=self._joined.host_join.patience.silence_s,
        )

    def _check_start(self, name: str, done: "Future[Any]") -> None:
        if not done.done():
            raise LaunchError(f"host {name!r} has not started its nodes for {_START_PATIENCE_S:g} s")
        error = done.exception()
        if error is not None and name in self._up():  # else its loss is the nodes' failure
            raise LaunchError(f"host {name!r} cannot start its nodes: {error}") from error

    def _on_lost(self, agent: RemoteAgent, why: str) -> None:
        with self._lock:
            if self._agents.get(agent.name) is not agent:
                return  # it was lost before this program began
            del self._agents[agent.name]
            self._views.pop(agent.name, None)
        self._coordinator.note_event("membership", host=agent.name, change="lost", why=why)
        self._relocation.lose(agent.name, why, agent.is_silent)

    def _on_joined(self, agent: RemoteAgent) -> None:
        if self._joined.is_elastic or self._up().get(agent.name) is agent:
            return  # the next program takes it in; or it was there at the start
        threading.Thread(target=self._take_in, args=(agent,), name=f"take in {agent.name}", daemon=True).start()

    def _take_in(self, agent: RemoteAgent) -> None:
        """Prepare a host that has joined the running program, and start nodes there that wait for one."""
        name, up = agent.name, {agent.name: agent}
        try:
            self._replace(agent)
            hardware = offered(self._joined.host_join.offers[name], agent.joining.hardware)
            agent.handle = _handlers(self._coordinator, self._logs, agent)
            self._coordinator.note_event("membership", host=name, change="joined")
            if self._tree is not None:
                send_tree(self._tree, up, is_up=lambda name: name in self._up())
            warn_of_hosts_apart(self._plan.run_dir, up)
            agent.ask(self._start_message(())).result(_START_PATIENCE_S)
            agent.tell_if_open(SetTracing(self._is_traced))
            self._relocation.gain(name, hardware)
        except (Unavailable, LaunchError, ValueError, TimeoutError) as error:
            if not self._is_closing:
                _log.warning("host %r has joined and cannot be used: %s", name, error)
            agent.connection.close("it cannot be used")

    def _replace(self, agent: RemoteAgent) -> None:
        """Count a host among those that are up, once the loss of its last agent is reported.

        Raises:
            LaunchError: that agent is not lost.
        """
        deadline = time.monotonic() + _START_PATIENCE_S
        while time.monotonic() < deadline:
            with self._lock:
                if agent.name not in self._agents:
                    self._agents[agent.name] = agent
                    return
            time.sleep(_LOOK_EVERY_S)
        raise LaunchError(f"host {agent.name!r} has an agent already")

    def _ask_to_start(self, node_id: str) -> "Future[None]":
        if not self._relocation.take_new(node_id):
            return self._agent_of(node_id).ask(agent_messages.RestartNode(node_id))
        (spec,) = without_code(one for one in self._plan.nodes if one.node_id == node_id)
        place = self._relocation.place_of(node_id).place
        return self._agent_of(node_id).ask(agent_messages.TakeOverNode(spec, self._payloads[node_id], place))

    def _tell(self, kind: Callable[[list[str]], Notice], node_ids: Iterable[str]) -> None:
        by_host: dict[str, list[str]] = {}
        for node_id in node_ids:
            by_host.setdefault(self.where(node_id), []).append(node_id)
        up = self._up()
        for host, ids in by_host.items():
            if host in up:
                up[host].tell_if_open(kind(ids))

    def _agent_of(self, node_id: str) -> RemoteAgent:
        agent = self._up().get(self.where(node_id))
        if agent is None:
            raise Unavailable(f"host {self.where(node_id)!r} is lost")
        return agent

    def _up(self) -> dict[str, RemoteAgent]:
        with self._lock:
            return dict(self._agents)

    def _note_views(self, name: str, done: "Future[list[View]]") -> None:
        with self._lock, contextlib.suppress(Exception):  # lost, or not started yet
            self._views[name] = time.monotonic(), done.result()


def _handlers(coordinator: Coordinator, logs: ReceivedLogs, agent: RemoteAgent) -> Handlers:
    """Return the handlers of an agent's messages: those of its nodes are for the coordinator."""
    on = (handlers := Handlers()).on
    on(agent_messages.Alive, lambda message: None)  # it is enough that it has come
    on(agent_messages.NodeNotice, lambda message: coordinator.tell(message.node_id, message.notice))
    on(agent_messages.NodeQuestion, lambda message: coordinator.ask(message.node_id, message.question))
    on(agent_messages.FindAll, lambda message: coordinator.find_all(message.addresses))
    on(agent_messages.CallsOfNodes, lambda message: coordinator.calls_of_nodes(message.calls))
    on(agent_messages.NodeLines, lambda line: logs.put(agent, line.node_id, line.is_stderr, line.text))
    on(
        agent_messages.NodeUnfinishedLine,
        lambda line: logs.put(agent, line.node_id, line.is_stderr, Unfinished(line.text, line.is_settled)),
    )
    return handlers


def _zero_if_gone(answer: "Future[int]") -> "Future[int]":
    """Return the answer's hits, or 0 if the host is gone, as ProcessHost does for a process that has ended."""
    found: Future[int] = Future()
    answer.add_done_callback(lambda done: found.set_result(0 if done.exception() is not None else done.result()))
    return found


def _text_of(answer: "Future[str]") -> str:
    if not answer.done():
        return f"(no answer within {_STACKS_PATIENCE_S:g} s)"
    error = answer.exception()
    return f"({error})" if error is not None else answer.result()
