"""Process mode: every node is a process of this host, forked from the template, watched over its own stream."""

import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from lp_pipe import connections
from lp_pipe.connections import Connection
from lp_pipe.connections.kernel_calls import new_selector
from lp_pipe.connections.socket_dir import make_socket_dir
from lp_pipe.context import NodeServices
from lp_pipe.errors import Unavailable
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host, give_up
from lp_pipe.launch.plan.hardware import this_host
from lp_pipe.launch.plan.launch_plan import LaunchPlan, serialize_nodes
from lp_pipe.launch.plan.placement import Placement, place_all, place_with_room
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.plan.surroundings import Surroundings
from lp_pipe.launch.processes import standard_streams
from lp_pipe.launch.processes.compute_threads import thread_environment
from lp_pipe.launch.processes.node_link import NodeLink
from lp_pipe.launch.processes.template import (
    KILLED,
    MARK,
    ExitQueue,
    LauncherPings,
    Template,
    check_descriptors,
    start_template,
    was_killed_by_others,
)
from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.lifecycle import ORPHAN_S
from lp_pipe.launch.supervision.messages import Failure, View
from lp_pipe.launch.supervision.node_api import NodeApi
from lp_pipe.process_tree import is_dying, state_of
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.telemetry.log_files import LogFiles, LogOutput
from lp_pipe.telemetry.log_pump import LogPump
from lp_pipe.telemetry.metrics import MetricsLog
from lp_pipe.telemetry.tracebacks import MOST_LINES, crash_traceback

_log = logging.getLogger(__name__)

_STACKS_PATIENCE_S = 3.0
_SILENT_S = 1.0  # from here on the kernel is asked for the state of a process
_DEAD = ("Z", "X")
_SHOWN_LINES = 20


def make_host(plan: LaunchPlan, metrics: MetricsLog) -> tuple[Host, Coordinator]:
    """Return a host that runs each node of `plan`, and each inner node of a MultiProcessingColocation, in a process.

    Raises:
        SerializationError: a node, or the plan's setup, cannot be sent to its process.
        ValueError: a group wants more cores, GPUs or memory than this host has, or another host.
    """
    hardware = this_host()
    places = place_with_room(plan.nodes, lambda spec: spec.may_wait, lambda some: place_all(some, hardware))
    payloads = serialize_nodes(plan)
    coordinator = Coordinator(plan, lambda address: f"unix:{host.socket_dir}/{address}", metrics)
    coordinator.wait_for_room(payloads.keys() - places.keys())
    host = ProcessHost(plan, coordinator, payloads, places)
    return host, coordinator


class ProcessHost(Host):
    """A host of processes: starts them, and connects their streams to the coordinator.

    surroundings: of the nodes; None: this process's as they are now, whatever it does later. log_output: what takes
        their lines; None: files in the run's folder, and this process's streams. membership: in a run on several hosts.
    orphan_s: see Template.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        coordinator: NodeApi,
        payloads: dict[str, bytes],
        places: dict[str, Placement],
        *,
        surroundings: Surroundings | None = None,
        log_output: LogOutput | None = None,
        membership: messages.HostMembership | None = None,
        preload: Sequence[str] | None = None,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._payloads = payloads
        self._places = places
        self._attempts = dict.fromkeys(payloads, 0)  # by node_id: which of its processes is the current one
        self._specs = {spec.node_id: spec for spec in plan.nodes}
        self._surroundings = surroundings or Surroundings.capture()
        self._membership = membership
        self._preload = preload
        self._orphan_s = orphan_s
        self._streams: dict[str, NodeLink] = {}
        self._pids: dict[str, int] = {}  # by node_id: of processes without a reported end
        self._ends: dict[str, str] = {}  # by node_id: how its last process ended, if it reported nothing
        self._told_to_stop: set[str] = set()  # by node_id: of the current processes
        self._faults = InjectedFaults()
        self._is_traced = False
        standard_streams.open_closed()  # before what is opened here takes their numbers
        self._log_output = log_output or LogFiles(plan.folder, self._specs)
        self._logs = LogPump(self._log_output, new_selector())
        self._exits = ExitQueue()
        self._template: Template | None = None
        self._pings: LauncherPings | None = None
        self._listener: connections.Listener | None = None

    def start(self) -> None:
        try:
            check_descriptors(len(self._specs))
            self._logs.start()
            self.socket_dir = make_socket_dir()  # from here on a Ctrl+C removes it
            self._listener = connections.listen(f"unix:{self.socket_dir}/coordinator", self._accept)
            self._exits.start()
            told = self._on_start, self._on_exit, self._on_template_lost
            self._template = start_template(*told, self._preload, self._orphan_s, self.socket_dir)
            self.mark = self._template.mark[MARK]
            self._pings = LauncherPings(self._template, self._streams)
            for spec in self._plan.nodes:
                if spec.node_id in self._places:
                    self._start_node(spec)
        except BaseException:  # also a Ctrl+C
            self.give_up()
            raise

    def give_up(self) -> None:
        give_up(self._coordinator, self._specs)  # also those that have started: `close` ends them

    def restart(self, node_id: str) -> None:
        self._attempts[node_id] += 1
        self._start_node(self._specs[node_id])

    def take_over(self, spec: NodeSpec, payload: bytes, place: Placement) -> None:
        """Start a node that was not in the plan, because its host is lost."""
        self._specs[spec.node_id], self._payloads[spec.node_id], self._places[spec.node_id] = spec, payload, place
        self._attempts[spec.node_id] = 1
        self._start_node(spec)

    def stop_nodes(self, node_ids: Iterable[str]) -> None:
        first_told = [node_id for node_id in node_ids if node_id not in self._told_to_stop]
        for node_id in self.dying().keys() & first_told:
            self._coordinator.tell(node_id, messages.EndsUnasked())
        self._told_to_stop.update(first_told)
        for node_id in first_told:
            stream = self._streams.get(node_id)
            if stream is not None:
                stream.tell_if_open(messages.Stop())

    def terminate(self, node_ids: Iterable[str]) -> None:
        self._signal_all(node_ids, signal.SIGTERM)

    def kill(self, node_ids: Iterable[str]) -> None:
        node_ids = list(node_ids)
        self._told_to_stop.update(node_ids)
        for node_id in node_ids:  # first: a call that comes while the process dies is to wait for the next one
            self._unlink_sockets(node_id)
        if self._template is not None:
            self._template.wake()
        self._signal_all(node_ids, signal.SIGKILL)

    def suspend(self) -> Callable[[], object]:
        if self._pings is None:
            return lambda: None  # nothing has started
        self._pings.suspend()
        return self._pings.resume

    def close(self) -> None:
        if self._pings is not None:
            self._pings.is_over.set()
        if self._listener is not None:
            self._listener.close()
        if self._template is not None:
            self._template.end_run()
        self._exits.close()
        for stream in list(self._streams.values()):
            stream.connection.close("the program has ended")
        self._logs.close()
        if self.socket_dir:
            shutil.rmtree(self.socket_dir, ignore_errors=True)

    def stacks(self) -> str:
        asked = [(node_id, stream.ask_stacks()) for node_id, stream in list(self._streams.items())]
        due = (
            time.monotonic() + _STACKS_PATIENCE_S
        )  # for all: several may be stopped, and a launcher waits 5 s for its agents
        return "\n".join(f"node {name}\n{_answer_of(answer, due)}" for name, answer in asked if answer is not None)

    def dying(self) -> Mapping[str, int]:
        return {node_id: pid for node_id, pid in list(self._pids.items()) if is_dying(pid)}

    def look(self, old_s: float) -> list[View]:
        views = [stream.look(old_s) for stream in list(self._streams.values())]
        return [self._with_state(view) if view.silence_s >= _SILENT_S else view for view in views]

    def _with_state(self, view: View) -> View:
        pid = self._pids.get(view.node)
        if pid is None or self._template is None:
            return view
        state = state_of(pid)
        return view._replace(process_state=state, template=self._template.pid if state in _DEAD else 0)

    def nodes_here(self) -> Mapping[NodeServices, str]:
        return {}

    def inject(self, fault: wire.Fault) -> "Mapping[str, Future[int]]":
        return self._faults.inject(fault, self._streams)

    def set_tracing(self, is_on: bool) -> None:
        self._is_traced = is_on
        for stream in list(self._streams.values()):
            stream.tell_if_open(messages.SetTracing(is_on))

    def clock_offset(self, host: str) -> float:
        return 0.0

    @property
    def past_hits(self) -> Mapping[str, int]:
        """By rule, how often a test's faults have struck in processes that have ended."""
        return self._faults.past_hits

    def where(self, node_id: str) -> str:
        return socket.gethostname()

    def last_lines(self, node_id: str) -> list[str]:
        return self._logs.last_lines(node_id)

    def log_path(self, node_id: str) -> Path | None:
        return self._log_output.path(node_id) if isinstance(self._log_output, LogFiles) else None

    def _start_node(self, spec: NodeSpec) -> None:
        assert self._template is not None
        self._told_to_stop.discard(spec.node_id)
        stdout, stderr = self._logs.add_node(spec.node_id)
        request = {
            "node": spec.node_id,
            "attempt": self._attempts[spec.node_id],
            "endpoint": f"unix:{self.socket_dir}/coordinator",
            "fresh": spec.resources.needs_fresh_interpreter,
            "env": self._environment_of(spec) if spec.resources.needs_fresh_interpreter else None,
        }
        try:
            self._template.start(request, stdout, stderr)
        finally:
            os.close(stdout)
            os.close(stderr)

    def _environment_of(self, spec: NodeSpec) -> dict[str, str]:
        assert self._template is not None
        return {
            **self._surroundings.environment,
            **self._template.mark,
            **thread_environment(spec.resources.threads),
            **self._places[spec.node_id].environment,
            **spec.resources.env,
        }

    def _search_path_of(self, spec: NodeSpec) -> list[str]:
        """Return the launcher's import path, after a PYTHONPATH that is the node's own."""
        own = spec.resources.env.get("PYTHONPATH", "").split(os.pathsep)
        return list(dict.fromkeys([*filter(None, own), *self._surroundings.sys_path]))

    def _accept(self, connection: Connection) -> None:
        stream = NodeLink(connection, self._coordinator, self._on_hello)
        stream.start()

    def _on_hello(self, stream: NodeLink, hello: messages.Hello) -> None:
        """Send a process that has connected what its node is."""
        node_id = hello.node_id
        if hello.attempt != self._attempts[node_id]:  # the word of a process that has died since
            stream.connection.close("another process is this node by now")
            return
        spec = self._specs[node_id]
        self._streams[node_id] = stream
        self._faults.begin(stream)
        if self._is_traced:
            stream.tell_if_open(messages.SetTracing(True))
        if self._coordinator.must_end(node_id):  # sent first, so that none of its code runs any more
            self._told_to_stop.add(node_id)
            stream.tell_if_open(messages.Stop())
        stream.tell_if_open(
            messages.StartNode(
                label=spec.label,
                index=spec.index,
                group_size=spec.group_size,
                run_dir=str(self._plan.run_dir),
                socket_dir=self.socket_dir,
                cwd=self._surroundings.cwd,
                sys_path=tuple(self._search_path_of(spec)),
                argv=tuple(self._surroundings.argv),
                main=dict(self._surroundings.main),
                env=self._environment_of(spec),
                threads=spec.resources.threads,
                cpus=tuple(self._places[node_id].cpus),
                devices=tuple(self._places[node_id].devices),
                grace_s=self._plan.grace_s,
                state=self._surroundings.state,
                membership=self._membership,
                previous_end=self._ends.get(node_id, ""),
            ),
            payload=self._payloads[node_id] if spec.may_start_again else self._payloads.pop(node_id),
        )

    def _on_start(self, node_id: str, pid: int) -> None:
        self._pids[node_id] = pid
        self._coordinator.tell(node_id, messages.Started(pid))

    def _on_exit(self, node_id: str, how: str) -> None:
        self._exits.put(lambda deadline: self._process_ended(node_id, how, deadline))

    def _on_template_lost(self, reason: str) -> None:
        how = f"the process was killed because {reason}"
        for node_id in list(self._specs):
            self._exits.put(functools.partial(self._process_ended, node_id, how, can_restart=False))

    def _process_ended(self, node_id: str, how: str, deadline: float, can_restart: bool = True) -> None:
        # The node's last messages are still in its stream. The wait has a limit: a forked grandchild may hold it open.
        stream = self._streams.pop(node_id, None)
        if stream is not None and not stream.closed.wait(max(0.0, deadline - time.monotonic())):
            stream.connection.close("the process has ended")
        if stream is not None:
            self._faults.end(stream)
        self._unlink_sockets(node_id)  # else callers would wait for the grandchild to accept
        is_loading = (stream is None or not stream.has_loaded) and not was_killed_by_others(how)
        self._report_death(node_id, how, deadline, can_restart, is_loading)
        self._pids.pop(node_id, None)
        self._coordinator.tell(node_id, messages.Gone())

    def _report_death(self, node_id: str, how: str, deadline: float, can_restart: bool, is_loading: bool) -> None:
        """Report a process that is gone; if its code had not ended before, that is the node's failure.

        is_loading: the process has died of what it loaded.
        """
        self._ends.pop(node_id, None)
        if not self._coordinator.is_running(node_id) and can_restart:
            is_by_us = node_id in self._told_to_stop or self._coordinator.must_end(node_id)
            if how.startswith(KILLED) and not is_by_us:
                _log.warning("node %s had ended, but not its threads and exit functions, when %s", node_id, how)
            return
        self._ends[node_id] = how
        if node_id not in self._told_to_stop:
            self._coordinator.tell(node_id, messages.EndsUnasked())
        if self._coordinator.must_end(node_id):
            return
        all_lines = self._logs.last_lines(node_id, max(0.0, deadline - time.monotonic()), MOST_LINES)
        printed, traceback = crash_traceback(all_lines, how)
        lines = printed[-_SHOWN_LINES:]
        output = "its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else "it had printed nothing"
        trace = f"The process raised no exception; {output}\n{traceback}".rstrip()
        failure = Failure("ProcessDied", how, trace, is_loading=is_loading)
        self._coordinator.tell(node_id, messages.CodeEnded(failure, can_restart))

    def _unlink_sockets(self, node_id: str) -> None:
        for address in self._specs[node_id].addresses:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.socket_dir}/{address}")

    def _signal_all(self, node_ids: Iterable[str], number: int) -> None:
        assert self._template is not None
        for node_id in node_ids:
            self._template.signal(node_id, number, tree=True)


def _answer_of(future: "Future[str]", due: float) -> str:
    try:
        return future.result(max(0.0, due - time.monotonic()))
    except Unavailable as error:
        return f"({error})"
    except TimeoutError:
        return f"(no answer within {_STACKS_PATIENCE_S} s: it is stopped, or inside C code that holds Python's lock)"


_LASTING = (wire.Fault.DROP, wire.Fault.DELAY, wire.Fault.PARTITION)


class InjectedFaults:
    """The faults that are in force on one host.

    past_hits: by rule, how often it has struck in processes that have ended.
    """

    def __init__(self) -> None:
        self._lasting: dict[str, wire.Fault] = {}
        self.past_hits: Counter[str] = Counter()

    def inject(self, fault: wire.Fault, streams: Mapping[str, NodeLink]) -> "Mapping[str, Future[int]]":
        """Send a fault to all processes. Return its hits by node, and under "" those of ended processes."""
        if fault.action == wire.Fault.HEAL:
            self._lasting.pop(fault.rule, None)
        elif fault.action in _LASTING:
            self._lasting[fault.rule] = fault
        past: Future[int] = Future()
        past.set_result(self.past_hits[fault.rule])
        asked = {node_id: stream.ask_fault(fault) for node_id, stream in list(streams.items())}
        return {**asked, "": past}

    def begin(self, stream: NodeLink) -> None:
        """Send the lasting faults to a process that has just started and has no connections yet."""
        for fault in list(self._lasting.values()):
            stream.ask_fault(fault)

    def end(self, stream: NodeLink) -> None:
        """Count the hits of a process that has ended."""
        self.past_hits.update(stream.last_hits)
