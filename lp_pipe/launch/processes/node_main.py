"""The life of a node's process: report in, become the node, run it, report its end."""

import contextlib
import faulthandler
import importlib
import io
import itertools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lp_pipe import connections
from lp_pipe.connections import Frame, fault_injection, frames, run_endpoints
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.context import NodeContext, StopSignal, enter_process
from lp_pipe.errors import Unavailable
from lp_pipe.launch.coordination.record import Failure
from lp_pipe.launch.coordination.view import to_wire
from lp_pipe.launch.plan import interpreter_state, logging_state
from lp_pipe.launch.processes import os_text
from lp_pipe.launch.processes.compute_threads import set_process_threads
from lp_pipe.launch.processes.execute import failure_from, run_node, run_setup
from lp_pipe.launch.processes.exit_work import finish_work
from lp_pipe.launch.processes.node_stdin import NodeStdin
from lp_pipe.launch.processes.template_process import LAUNCHER_PATIENCE_S
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.rpc import codec, main_module
from lp_pipe.rpc.fork_guard import ForkGuard, no_endpoint
from lp_pipe.rpc.remote_error import printable
from lp_pipe.telemetry import waits
from lp_pipe.telemetry.metrics import as_numbers
from lp_pipe.telemetry.positions import positions

_log = logging.getLogger(__name__)

_STREAM, _IN_THAT_PROCESS = "the node's connection to its launcher", "do it there"
_HEARD_WITHIN_S = 2.0  # over a network that is down, nothing is


class Supervision:
    """The node's end of its stream to the coordinator; as NodeServices, what the node's code may ask of it.

    attempt: 0 in the node's first process.
    """

    def __init__(self, endpoint: str, attempt: int) -> None:
        self._is_first = attempt == 0
        self.stop_signal = StopSignal()
        self.count_calls: Callable[[], int | None] = lambda: None
        self.started: Future[tuple[wire.Start, Generator[Any, None, None]]] = Future()
        self._pending: dict[int, Future[str]] = {}
        self._owner = ForkGuard()  # a forked child has nobody who reads the answers
        self._ids = itertools.count(1)
        self._endpoint_prefix = ""
        self._connection = connections.connect(endpoint, idle_timeout_s=LAUNCHER_PATIENCE_S)
        self._actions: dict[str, Callable[[Any], None]] = {
            "stop": lambda message: self.stop_signal.set(),
            "resolved": self._on_resolved,
            "stacks": self._on_stacks,
            "fault": self._on_fault,
            "ping": self._on_ping,
            "waits": self._on_waits,
        }
        self._connection.start(self._on_frame, self._on_close)

    def send(self, **message: Any) -> None:
        """Send one Supervision message.

        Raises:
            Unavailable: the launcher is gone.
        """
        body = wire.Supervision(**message).SerializeToString()
        self._connection.send(Frame(frames.SUPERVISION, body=body))

    def use_places_of(self, start: wire.Start) -> None:
        """From now on it is known where the servers of the run listen."""
        folder = os_text.unpack(start.socket_dir)
        if not start.membership.run:
            self._endpoint_prefix = f"unix:{folder}/"
            return
        run = start.membership.run
        self._endpoint_prefix = run_endpoints.name_of(run, "")
        credentials = Credentials.from_bytes(start.membership.credentials)
        host, reached_at, silence_s = start.membership.host, start.membership.reached_at, start.membership.silence_s
        run_endpoints.join(run_endpoints.RunMember(run, host, credentials, self.find, folder, reached_at, silence_s))

    def end(self, failure: Failure | None) -> None:
        """Report how the node's code ended."""
        ended = wire.Ended()
        if failure is not None:
            ended.type_name, ended.message = printable(failure.type_name), printable(failure.message)
            ended.traceback = printable(failure.traceback)
            ended.is_unavailable, ended.is_plain_echo = failure.is_unavailable, failure.is_plain_echo
        with contextlib.suppress(Unavailable):  # nobody is left who would want to know
            self.send(ended=ended)

    def close(self) -> None:
        """The last that this process says to its launcher."""
        with contextlib.suppress(Unavailable):
            for rule, hits in fault_injection.hits().items():
                self.send(fault_report=wire.FaultReport(rule=rule, hits=hits))
        self._connection.close("the node has ended")

    # NodeServices

    def endpoint_for(self, address: str) -> str:
        return self._endpoint_prefix + address

    def register(self, address: str, endpoint: str) -> None:
        self.send(register=wire.Register(address=address, endpoint=run_endpoints.endpoint_to_register(endpoint)))

    def withdraw(self, address: str, is_failing: bool) -> None:
        with contextlib.suppress(Unavailable):
            self.send(register=wire.Register(address=address, failing=is_failing))
        if is_failing:
            self._be_heard()

    def resolve(self, address: str) -> "Future[str]":
        if not self._owner.is_here:
            return no_endpoint()
        return self._ask(lambda number: {"resolve": wire.Resolve(id=number, address=address)})

    def find(self, address: str) -> "Future[str]":
        """As `resolve`, but Unavailable at once when nobody has registered it."""
        return self._ask(lambda number: {"resolve": wire.Resolve(id=number, address=address, now=True)})

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        loss = self._ask(lambda number: {"kept_state": wire.KeptState(id=number, addresses=addresses, watch=True)})
        self._be_heard()
        return loss

    def has_lost_state(self, address: str) -> bool:
        if self._is_first:
            return False
        answer = self._ask(lambda number: {"kept_state": wire.KeptState(id=number, addresses=[address])})
        return bool(answer.result())

    def reserve_port(self, address: str) -> str:
        return self._ask(lambda number: {"reserve_port": wire.ReservePort(id=number, address=address)}).result()

    def first_failure(self) -> None:
        """Its launcher says it."""

    def request_stop(self) -> None:
        self._owner.check(_STREAM, _IN_THAT_PROCESS)
        with contextlib.suppress(Unavailable):  # then the stop is under way already
            self.send(stop_request=wire.StopRequest())
        self._be_heard()

    def inner_nodes_ended(self, colocation: str) -> "Future[str]":
        return self._ask(lambda number: {"inner_nodes": wire.InnerNodes(id=number, colocation=colocation)})

    def stop_inner_nodes(self, colocation: str) -> None:
        with contextlib.suppress(Unavailable):  # then they stop anyway
            self.send(inner_nodes=wire.InnerNodes(colocation=colocation, stop=True))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        self._owner.check(_STREAM, _IN_THAT_PROCESS)
        numbers, step = as_numbers(metrics, step)
        names, values = list(numbers), list(numbers.values())
        self.send(metrics=wire.Metrics(names=names, values=values, step=step or 0, has_step=step is not None))

    def log_event(self, event: str, step: int) -> None:
        self.send(metrics=wire.Metrics(event=event, step=step, has_step=True))

    def _be_heard(self) -> None:
        """The launcher must know what was said before others notice what the node does next, and tell it of that."""
        if not self.stop_signal.event.is_set() and not self._connection.is_sending_here():
            futures.wait([self._ask(lambda number: {"hear": wire.Hear(id=number)})], _HEARD_WITHIN_S)

    def _ask(self, question: Callable[[int], dict[str, Any]]) -> "Future[str]":
        number = next(self._ids)
        answer: Future[str] = Future()
        self._pending[number] = answer
        try:
            if not self._owner.is_here:
                raise Unavailable(f"the launcher answers the node, not process {os.getpid()}, which it has forked")
            if self._connection.is_sending_here():
                raise Unavailable(
                    "this code (a signal handler, a __del__) has interrupted its thread as that was sending to the "
                    "launcher, which cannot answer before this code returns: call again later"
                )
            self.send(**question(number))
        except Unavailable as error:
            if self._pending.pop(number, None) is not None:
                answer.set_exception(error)
        return answer

    def _on_frame(self, frame: Frame) -> None:
        message = wire.Supervision.FromString(bytes(frame.body))
        kind = message.WhichOneof("message")
        if kind == "start":
            self.started.set_result((message.start, codec.loads_in_turn(frame.buffers[0])))
        elif kind is not None:
            self._actions[kind](getattr(message, kind))

    def _on_resolved(self, message: wire.Resolved) -> None:
        answer = self._pending.pop(message.id, None)
        if answer is None:
            return
        if message.not_in_program:
            answer.set_exception(RuntimeError(message.unavailable))
        elif message.unavailable:
            answer.set_exception(Unavailable(message.unavailable))
        else:
            answer.set_result(message.endpoint)

    def _on_ping(self, message: wire.Ping) -> None:
        calls = self.count_calls()
        if calls is not None:
            with contextlib.suppress(Unavailable):
                self.send(ping=wire.Ping(calls=calls))

    def _on_stacks(self, message: wire.Stacks) -> None:
        with contextlib.suppress(Unavailable):
            self.send(stacks=wire.Stacks(id=message.id, text=all_stacks()))

    def _on_waits(self, message: wire.Waits) -> None:
        # A program that this node has launched looks after its own nodes, where they are threads of this process.
        own = [one for node, one in waits.look(message.old_s) if node is None or node.services is self]
        places = [text for node, text in positions() if node.services is self]
        with contextlib.suppress(Unavailable):
            self.send(waits=to_wire(own, waits.pools(), places))

    def _on_fault(self, message: wire.Fault) -> None:
        hits = fault_injection.apply(message)
        with contextlib.suppress(Unavailable):
            self.send(fault_report=wire.FaultReport(id=message.id, hits=hits))

    def _on_close(self, reason: str) -> None:
        if not self.started.done():
            self.started.set_exception(Unavailable(f"the launcher went away: {reason}"))
        while self._pending:
            _, answer = self._pending.popitem()
            answer.set_exception(Unavailable(f"the launcher went away: {reason}"))
        self.stop_signal.set()


def main(node_id: str, endpoint: str, attempt: int, is_forked: bool = False) -> int:
    """Run one node in this process; returns the exit status. attempt: how often the node was restarted before."""
    kept = frozenset(sys.modules) - {main_module.MAIN} if is_forked else None
    faulthandler.enable(2, all_threads=False)  # a crash in C code leaves the Python stack in the node's output
    supervision = Supervision(endpoint, attempt)
    supervision.send(hello=wire.Hello(node_id=node_id, pid=os.getpid(), attempt=attempt))
    start, loaded = supervision.started.result()
    try:
        failure = _run(start, loaded, supervision)
    except BaseException as error:  # the node's modules or arguments did not load
        failure = failure_from(error)
    supervision.end(failure)  # before the last work, which may take long: the others must hear of a failure now
    if failure is not None:
        supervision.stop_signal.event.set()  # the programs that this node has launched are to stop
    finish_work(node_id, supervision.stop_signal.event, None if failure is None else start.grace_s, kept)
    supervision.close()
    return 0 if failure is None else 1


def _pin_to(cpus: Iterable[int]) -> None:
    """Every thread: the call is for one, and the stream's is there already."""
    if hasattr(os, "sched_setaffinity"):
        try:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cpus)
        except OSError as error:  # no /proc, or a container's profile refuses the call
            _log.warning("this node cannot be bound to its cores %s: %s", sorted(cpus), describe_error(error))


def all_stacks() -> str:
    """The Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)


def _run(start: wire.Start, loaded: Generator[Any, None, None], supervision: Supervision) -> Failure | None:
    _set_up_process(start)
    main_module.enter_node(os_text.unpack_map(start.main))
    interpreter_state.restore(start.state)
    if os.environ.get("PYTHONFAULTHANDLER") == "0":
        faulthandler.disable()

    def load_next() -> Any:
        with main_module.defining_main():
            return next(loaded)

    failure = run_setup(lambda: (load_next() or _nothing)())
    if failure is not None:
        return failure
    supervision.use_places_of(start)
    node, resources = load_next()
    loaded.close()  # it remembers the arguments
    logging_state.hold_level()
    context = NodeContext(
        label=start.label,
        index=start.index,
        group_size=start.group_size,
        resources=resources,
        run_dir=Path(os_text.unpack(start.run_dir)),
        services=supervision,
        devices=tuple(start.devices),
        grace_s=start.grace_s,
        stop_signal=supervision.stop_signal,
        owns_arguments=True,
        prepare_thread=interpreter_state.thread_state(),  # after setup(), which may have changed it
    )
    supervision.count_calls = lambda: context.calls
    enter_process(context)
    host = start.membership.host.rpartition("/")[0]
    sys.stdin = NodeStdin(context, os_text.unpack(start.socket_dir), host)
    set_process_threads(start.threads)
    if context.is_stopping:
        return None
    return run_node(node, context)


def _nothing() -> None:
    """The setup function of a program without one."""


def _set_up_process(start: wire.Start) -> None:
    """Environment, folder and import path as they were at launch()."""
    os.environ.clear()
    os.environ.update(os_text.unpack_map(start.env))
    sys.path[:] = os_text.unpack_all(start.sys_path)
    sys.argv[:] = os_text.unpack_all(start.argv)
    importlib.invalidate_caches()
    if os.environ.get(fault_injection.VARIABLE):
        fault_injection.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # they are pipes, but people watch them
    with contextlib.suppress(FileNotFoundError):
        os.chdir(os_text.unpack(start.cwd))
    if start.cpus:
        _pin_to(start.cpus)
