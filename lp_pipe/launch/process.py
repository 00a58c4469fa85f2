"""Process mode: every node is a process of this host, forked from the template, watched over its own stream."""

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lp_pipe import connections
from lp_pipe.connections import Connection, Frame, frames
from lp_pipe.errors import Unavailable
from lp_pipe.launch import os_text
from lp_pipe.launch.coordinator import Coordinator, Failure
from lp_pipe.launch.host import Host
from lp_pipe.launch.plan import NodeSpec, Plan, serialize_nodes
from lp_pipe.launch.socket_dir import make_socket_dir
from lp_pipe.launch.template import MARK, Template
from lp_pipe.launch.threads import THREAD_VARIABLES
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.telemetry.logs import LogPump
from lp_pipe.telemetry.metrics import MetricsLog

_PING_EVERY_S = 1.0
_LAST_FRAMES_PATIENCE_S = 0.5
_STACKS_PATIENCE_S = 3.0


def make_host(plan: Plan, metrics: MetricsLog) -> tuple[Host, Coordinator]:
    """A host that runs each node of `plan` in a process of its own.

    Raises:
        SerializationError: a node cannot be sent to its process.
    """
    payloads = serialize_nodes(plan)
    socket_dir = make_socket_dir()
    coordinator = Coordinator(plan, lambda address: f"unix:{socket_dir}/{address}", metrics)
    return ProcessHost(plan, coordinator, payloads, socket_dir), coordinator


class ProcessHost(Host):
    """The agent of this host: starts the processes, and ties their streams to the coordinator."""

    def __init__(self, plan: Plan, coordinator: Coordinator, payloads: dict[str, bytes], socket_dir: str) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._payloads = payloads
        self._socket_dir = self.socket_dir = socket_dir
        self._specs = {spec.node_id: spec for spec in plan.nodes}
        self._environment = dict(os.environ)  # as it is at launch(), whatever the launcher does later
        self._cwd = os.getcwd()
        self._sys_path = list(sys.path)
        self._streams: dict[str, _NodeStream] = {}
        self._logs = LogPump(plan.run_dir / "logs")
        self._is_over = threading.Event()
        self._template: Template | None = None
        self._listener: connections.Listener | None = None

    def start(self) -> None:
        self._logs.start()
        try:
            self._listener = connections.listen(f"unix:{self._socket_dir}/coordinator", self._accept)
            self._template = Template(self._on_start, self._on_exit, self._on_template_lost)
            self.mark = self._template.mark[MARK]
            for spec in self._plan.nodes:
                self._start_node(spec)
        except BaseException:  # also a Ctrl+C
            self._coordinator.request_stop()
            for spec in self._plan.nodes:
                self._coordinator.node_abandoned(spec.node_id)
            self.close()
            raise
        threading.Thread(target=self._ping, name="launcher pings", daemon=True).start()

    def stop_nodes(self) -> None:
        for spec in self._coordinator.nodes_up():
            self._tell(spec.node_id, stop=wire.Stop())

    def terminate(self) -> None:
        self._signal_all(signal.SIGTERM)

    def kill(self) -> None:
        self._signal_all(signal.SIGKILL)

    def close(self) -> None:
        self._is_over.set()
        if self._listener is not None:
            self._listener.close()
        if self._template is not None:
            self._template.close()
        for stream in list(self._streams.values()):
            stream.connection.close("the program has ended")
        self._logs.close()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def stacks(self) -> str:
        asked = [(node_id, stream.ask_stacks()) for node_id, stream in list(self._streams.items())]
        return "\n".join(f"node {node_id}\n{_answer_of(future)}" for node_id, future in asked if future is not None)

    def last_lines(self, node_id: str) -> list[str]:
        return self._logs.last_lines(node_id)

    def log_path(self, node_id: str) -> Path | None:
        return self._logs.path(node_id)

    def _start_node(self, spec: NodeSpec) -> None:
        assert self._template is not None
        stdout, stderr = self._logs.add_node(spec.node_id)
        request = {
            "node": spec.node_id,
            "endpoint": f"unix:{self._socket_dir}/coordinator",
            "socket_dir": self._socket_dir,
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
            **self._environment,
            **self._template.mark,
            **dict.fromkeys(THREAD_VARIABLES, str(spec.resources.threads)),
            **spec.resources.env,
        }

    def _accept(self, connection: Connection) -> None:
        stream = _NodeStream(connection, self)
        connection.start(stream.on_frame, stream.on_close)

    def said_hello(self, stream: "_NodeStream", node_id: str) -> None:
        """A node's process has reported in: send it what it is to be."""
        spec = self._specs[node_id]
        self._streams[node_id] = stream
        stream.send(
            start=wire.Start(
                label=spec.label,
                index=spec.index,
                group_size=spec.group_size,
                run_dir=os_text.pack(str(self._plan.run_dir)),
                socket_dir=os_text.pack(self._socket_dir),
                cwd=os_text.pack(self._cwd),
                sys_path=os_text.pack_all(self._sys_path),
                argv=os_text.pack_all(sys.argv),
                env=os_text.pack_map(self._environment_of(spec)),
                threads=spec.resources.threads,
                grace_s=self._plan.grace_s,
                log_level=logging.getLogger().getEffectiveLevel(),
            ),
            payload=self._payloads.pop(node_id),
        )
        if self._coordinator.stop_requested:
            stream.send(stop=wire.Stop())

    @property
    def coordinator(self) -> Coordinator:
        """Where the streams report to."""
        return self._coordinator

    def _on_start(self, node_id: str, pid: int) -> None:
        self._coordinator.node_started(node_id, pid)

    def _on_exit(self, node_id: str, status: int) -> None:
        # What the node said last is still in its stream; a forked grandchild may hold that open, so not for ever.
        stream = self._streams.get(node_id)
        if stream is not None and not stream.closed.wait(_LAST_FRAMES_PATIENCE_S):
            stream.connection.close("the process has ended")
        self._report_death(node_id, _how_it_died(status))
        self._coordinator.node_down(node_id)

    def _on_template_lost(self, reason: str) -> None:
        for spec in self._coordinator.nodes_up():
            stream = self._streams.get(spec.node_id)
            if stream is not None:
                stream.closed.wait(_LAST_FRAMES_PATIENCE_S)
            self._report_death(spec.node_id, f"the process was killed because {reason}")
            self._coordinator.node_down(spec.node_id)

    def _report_death(self, node_id: str, how: str) -> None:
        """A process is gone; if its code had not ended before, that is the node's failure."""
        if not self._coordinator.is_running(node_id):
            return
        if self._coordinator.stop_requested:
            self._coordinator.node_abandoned(node_id)
            return
        lines = self._logs.last_lines(node_id)
        output = "its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else "it had printed nothing"
        self._coordinator.node_ended(node_id, Failure("ProcessDied", how, f"The process left no traceback; {output}"))

    def _signal_all(self, number: int) -> None:
        assert self._template is not None
        for spec in self._coordinator.nodes_up():
            self._template.signal(spec.node_id, number, tree=True)

    def _tell(self, node_id: str, **message: Any) -> None:
        stream = self._streams.get(node_id)
        if stream is not None:
            stream.send(**message)

    def _ping(self) -> None:
        while not self._is_over.wait(_PING_EVERY_S):
            for node_id in list(self._streams):
                self._tell(node_id, ping=wire.Ping())


class _NodeStream:
    """The coordinator's end of one node's supervision stream."""

    def __init__(self, connection: Connection, host: ProcessHost) -> None:
        self.connection = connection
        self.closed = threading.Event()
        self._host = host
        self._coordinator = host.coordinator
        self._node_id = ""
        self._stacks: dict[int, Future[str]] = {}
        self._actions: dict[str, Callable[[Any], None]] = {
            "hello": self._on_hello,
            "register": self._on_register,
            "resolve": self._on_resolve,
            "reserve_port": self._on_reserve_port,
            "metrics": self._on_metrics,
            "stop_request": lambda message: self._coordinator.request_stop(),
            "ended": self._on_ended,
            "stacks": self._on_stacks,
        }

    def send(self, payload: bytes | None = None, **message: Any) -> None:
        body = wire.Supervision(**message).SerializeToString()
        buffers = () if payload is None else (payload,)
        with contextlib.suppress(Unavailable):  # the process has just ended; its exit is reported by the template
            self.connection.send(Frame(frames.SUPERVISION, body=body, buffers=buffers))

    def ask_stacks(self) -> "Future[str] | None":
        if self.closed.is_set():
            return None
        answer: Future[str] = Future()
        self._stacks[id(answer)] = answer
        self.send(stacks=wire.Stacks(id=id(answer)))
        return answer

    def on_frame(self, frame: Frame) -> None:
        message = wire.Supervision.FromString(bytes(frame.body))
        kind = message.WhichOneof("message")
        if kind in self._actions and (self._node_id or kind == "hello"):
            self._actions[kind](getattr(message, kind))

    def on_close(self, reason: str) -> None:
        self.closed.set()

    def _on_hello(self, message: wire.Hello) -> None:
        self._node_id = message.node_id
        self._host.said_hello(self, message.node_id)

    def _on_register(self, message: wire.Register) -> None:
        if message.endpoint:
            self._coordinator.register(message.address, message.endpoint)
        else:
            self._coordinator.withdraw(message.address)

    def _on_resolve(self, message: wire.Resolve) -> None:
        future = self._coordinator.resolve(message.address)
        future.add_done_callback(lambda done: self.send(resolved=_resolved(message.id, done)))

    def _on_reserve_port(self, message: wire.ReservePort) -> None:
        try:
            answer = wire.Resolved(id=message.id, endpoint=self._coordinator.reserve_port(message.address))
        except RuntimeError as error:
            answer = wire.Resolved(id=message.id, unavailable=str(error), not_in_program=True)
        self.send(resolved=answer)

    def _on_metrics(self, message: wire.Metrics) -> None:
        step = message.step if message.has_step else None
        values = dict(zip(message.names, message.values, strict=True))
        self._coordinator.log_metrics(self._node_id, values, step)

    def _on_ended(self, message: wire.Ended) -> None:
        failure = None
        if message.type_name:
            failure = Failure(message.type_name, message.message, message.traceback, message.is_unavailable)
        self._coordinator.node_ended(self._node_id, failure)

    def _on_stacks(self, message: wire.Stacks) -> None:
        answer = self._stacks.pop(message.id, None)
        if answer is not None:
            answer.set_result(message.text)


def _resolved(number: int, done: "Future[str]") -> wire.Resolved:
    error = done.exception()
    if error is None:
        return wire.Resolved(id=number, endpoint=done.result())
    return wire.Resolved(id=number, unavailable=str(error), not_in_program=not isinstance(error, Unavailable))


def _answer_of(future: "Future[str]") -> str:
    try:
        return future.result(_STACKS_PATIENCE_S)
    except TimeoutError:
        return f"(no answer within {_STACKS_PATIENCE_S} s: it is stopped, or inside C code that holds Python's lock)"


def _how_it_died(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        hint = " (kill -9, or the kernel when memory ran out: see dmesg)" if name == "SIGKILL" else ""
        return f"the process was killed by {name}{hint}"
    return f"the process ended with exit code {os.waitstatus_to_exitcode(status)} without reporting why (os._exit?)"
