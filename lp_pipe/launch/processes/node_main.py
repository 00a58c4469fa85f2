"""The main function of a node's process: connect to the launcher, become the node, run it, report its end."""

import contextlib
import dataclasses
import faulthandler
import importlib
import io
import logging
import os
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from lp_pipe import connections
from lp_pipe.connections import Frame, fault_injection, run_endpoints
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.context import NodeContext, StopSignal, enter_process
from lp_pipe.errors import Unavailable
from lp_pipe.launch.plan import interpreter_state, logging_state
from lp_pipe.launch.processes.compute_threads import set_process_threads
from lp_pipe.launch.processes.execute import failure_from, run_node, run_setup
from lp_pipe.launch.processes.exit_work import finish_work
from lp_pipe.launch.processes.node_stdin import NodeStdin
from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.lifecycle import LAUNCHER_PATIENCE_S
from lp_pipe.launch.supervision.messages import Failure, Notice, Question, View
from lp_pipe.launch.supervision.node_api import MessageServices
from lp_pipe.launch.supervision.peer import Peer
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.rpc import child_processes, codec, main_module
from lp_pipe.rpc.fork_guard import ForkGuard, no_endpoint
from lp_pipe.rpc.remote_error import printable
from lp_pipe.telemetry import tracing, waits
from lp_pipe.telemetry.edges import edge_counts
from lp_pipe.telemetry.positions import positions
from lp_pipe.telemetry.tracing import TraceBatch

R = TypeVar("R")

_log = logging.getLogger(__name__)

_STREAM, _IN_THAT_PROCESS = "the node's connection to its launcher", "do it there"
_HEARD_WITHIN_S = 2.0  # an upper bound, for a network that is down


class Supervision(MessageServices):
    """The node's end of its connection to the launcher; as NodeServices, what the node's code may ask for.

    attempt: 0 in the node's first process.
    """

    def __init__(self, endpoint: str, node_id: str, attempt: int) -> None:
        self._is_first = attempt == 0
        self.stop_signal = StopSignal()
        self.count_calls: Callable[[], int | None] = lambda: None
        self.started: Future[tuple[messages.StartNode, Generator[Any, None, None]]] = Future()
        self._owner = ForkGuard()  # a forked child gets no answers
        self._endpoint_prefix = ""
        self._connection = connections.connect(endpoint, idle_timeout_s=LAUNCHER_PATIENCE_S)
        self._peer = Peer(self._connection, self._on_message)
        self._connection.start(self._on_frame, self._on_close)
        self._tell(messages.Hello(node_id, os.getpid(), attempt))

    def use_places_of(self, start: messages.StartNode) -> None:
        """Find servers by the folder, or the membership, that the start names."""
        membership = start.membership
        if membership is None:
            self._endpoint_prefix = f"unix:{start.socket_dir}/"
            return
        self._endpoint_prefix = run_endpoints.name_of(membership.run, "")
        run_endpoints.join(
            run_endpoints.RunMember(
                membership.run,
                membership.host,
                Credentials.from_bytes(membership.credentials),
                self.find,
                start.socket_dir,
                membership.reached_at,
                membership.silence_s,
            )
        )

    def end(self, failure: Failure | None) -> None:
        """Report how the node's code ended."""
        if failure is not None:
            failure = dataclasses.replace(
                failure,
                type_name=printable(failure.type_name),
                message=printable(failure.message),
                traceback=printable(failure.traceback),
            )
        self._peer.tell_if_open(messages.CodeEnded(failure))

    def loaded(self) -> None:
        """Report that the node's own code begins now."""
        self._peer.tell_if_open(messages.Loaded())

    def close(self) -> None:
        """Report a test's faults, and close the connection."""
        tracing.end()
        for rule, hits in fault_injection.hits().items():
            self._peer.tell_if_open(messages.LastHits(rule, hits))
        self._connection.close("the node has ended")

    # NodeServices

    def endpoint_for(self, address: str) -> str:
        return self._endpoint_prefix + address

    def new_endpoint(self) -> str:
        return self._endpoint_prefix + uuid.uuid4().hex[:16]

    def register(self, address: str, endpoint: str) -> None:
        super().register(address, run_endpoints.endpoint_to_register(endpoint))

    def withdraw(self, address: str, is_failing: bool) -> None:
        self._peer.tell_if_open(messages.Withdraw(address, is_failing))
        if is_failing:
            self._be_heard()

    def resolve(self, address: str) -> "Future[str]":
        return super().resolve(address) if self._owner.is_here else no_endpoint()

    def find(self, address: str) -> "Future[str]":
        """Return a future of the endpoint; Unavailable at once if no server is registered there."""
        return self._ask(messages.Find(address))

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        loss = super().watch_state(addresses)
        self._be_heard()
        return loss

    def has_lost_state(self, address: str) -> bool:
        return not self._is_first and super().has_lost_state(address)

    def request_stop(self) -> None:
        self._owner.check(_STREAM, _IN_THAT_PROCESS)
        self._peer.tell_if_open(messages.RequestStop())  # without a launcher the stop is under way already
        self._be_heard()

    def stop_inner_nodes(self, colocation: str) -> None:
        self._peer.tell_if_open(messages.StopInnerNodes(colocation))  # without a launcher they stop anyway

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        self._owner.check(_STREAM, _IN_THAT_PROCESS)
        super().log_metrics(metrics, step)

    def _tell(self, notice: Notice) -> None:
        self._peer.tell(notice)

    def _ask(self, question: Question[R]) -> "Future[R]":
        problem = ""
        if not self._owner.is_here:
            problem = f"the launcher answers the node, not process {os.getpid()}, which it has forked"
        elif self._connection.is_sending_here():
            problem = (
                "this code (a signal handler, a __del__) has interrupted its thread as that was sending to the "
                "launcher, which cannot answer before this code returns: call again later"
            )
        if not problem:
            return self._peer.ask(question)
        answer: Future[R] = Future()
        answer.set_exception(Unavailable(problem))
        return answer

    def _be_heard(self) -> None:
        """Wait until the launcher has handled what was sent.

        Other nodes may notice what this one does next, and report it; the launcher must know the reason before.
        """
        if not self.stop_signal.event.is_set() and not self._connection.is_sending_here():
            futures.wait([self._ask(messages.Hear())], _HEARD_WITHIN_S)

    def _on_frame(self, frame: Frame) -> None:
        if frame.buffers:  # StartNode. Not handled as a message, which would keep the node's arguments
            self.started.set_result((messages.decode(frame.body), codec.loads_in_turn(frame.buffers[0])))
        else:
            self._peer.on_frame(frame)

    def _on_message(self, message: Any) -> object:
        match message:
            case messages.Stop():
                self.stop_signal.set()
            case messages.Stacks():
                return all_stacks()
            case messages.InjectFault():
                return fault_injection.apply(wire.Fault.FromString(message.fault))
            case messages.Ping():
                calls = self.count_calls()
                if calls is not None:
                    self._peer.tell_if_open(messages.CallsTaken(calls))
            case messages.SetTracing():
                self._set_tracing(message.is_on)
            case messages.Look():
                self._peer.tell_if_open(messages.Waits(self._view(message.old_s)))
        return None

    def _view(self, old_s: float) -> View:
        # Left out: threads that are nodes of a program which this node has launched. That program watches them itself.
        own = [one for node, one in waits.look(old_s) if node is None or node.services is self]
        places = [text for node, text in positions() if node.services is self]
        return View(own, waits.pools(), places, edges=edge_counts(self))

    def _set_tracing(self, is_on: bool) -> None:
        if not is_on:  # in a thread of its own: this one reads the connection, and the last spans may be many
            threading.Thread(target=tracing.end, name="end of a trace", daemon=True).start()
        elif not tracing.begin(self._send_spans):
            self._peer.tell_if_open(messages.SpansRecorded(TraceBatch([], {}, is_last=True)))

    def _send_spans(self, batches: Mapping[NodeContext | None, TraceBatch]) -> None:
        own = [batch for node, batch in batches.items() if node is None or node.services is self]
        for batch in own:
            self._peer.tell_if_open(messages.SpansRecorded(batch))

    def _on_close(self, reason: str) -> None:
        reason = f"the launcher went away: {reason}"
        if not self.started.done():
            self.started.set_exception(Unavailable(reason))
        self._peer.on_close(reason)
        self.stop_signal.set()


def main(node_id: str, endpoint: str, attempt: int, is_forked: bool = False) -> int:
    """Run one node in this process; returns the exit status. attempt: how often the node was restarted before."""
    kept = frozenset(sys.modules) - {main_module.MAIN} if is_forked else None
    faulthandler.enable(2, all_threads=False)  # a crash in C code leaves the Python stack in the node's output
    supervision = Supervision(endpoint, node_id, attempt)
    start, loaded = supervision.started.result()
    try:
        failure = _run(start, loaded, supervision)
    except BaseException as error:  # the node's modules or arguments did not load
        failure = dataclasses.replace(failure_from(error), is_loading=True)
    supervision.end(failure)  # first: other nodes must hear of a failure at once, and the exit work may take long
    if failure is not None:
        supervision.stop_signal.event.set()  # stops the programs that this node has launched
    finish_work(node_id, supervision.stop_signal.event, None if failure is None else start.grace_s, kept)
    supervision.close()
    return 0 if failure is None else 1


def _pin_to(cpus: Iterable[int]) -> None:
    """Bind every thread of this process to these cores; some threads have started already."""
    if hasattr(os, "sched_setaffinity"):
        try:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cpus)
        except OSError as error:  # no /proc, or a container's profile refuses the call
            _log.warning("this node cannot be bound to its cores %s: %s", sorted(cpus), describe_error(error))


def all_stacks() -> str:
    """Return the Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)


def _run(start: messages.StartNode, loaded: Generator[Any, None, None], supervision: Supervision) -> Failure | None:
    _set_up_process(start)
    child_processes.enter_node(start.main)
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
    loaded.close()  # else it would keep the arguments alive
    logging_state.hold_level()
    context = NodeContext(
        label=start.label,
        index=start.index,
        group_size=start.group_size,
        resources=resources,
        run_dir=Path(start.run_dir),
        services=supervision,
        devices=start.devices,
        grace_s=start.grace_s,
        previous_end=start.previous_end,
        stop_signal=supervision.stop_signal,
        owns_arguments=True,
        prepare_thread=interpreter_state.thread_state(),  # read after setup(), which may have changed it
    )
    supervision.count_calls = lambda: context.calls
    enter_process(context)
    host = start.membership.host.rpartition("/")[0] if start.membership is not None else ""
    sys.stdin = NodeStdin(context, start.socket_dir, host)
    set_process_threads(start.threads)
    supervision.loaded()
    if context.is_stopping:
        return None
    return run_node(node, context)


def _nothing() -> None:
    """The setup function of a program without one."""


def _set_up_process(start: messages.StartNode) -> None:
    """Set the environment, the folder and the import path to what they were at launch()."""
    os.environ.clear()
    os.environ.update(start.env)
    sys.path[:] = start.sys_path
    sys.argv[:] = start.argv
    importlib.invalidate_caches()
    if os.environ.get(fault_injection.VARIABLE):
        fault_injection.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # pipes have none, but users watch the output
    with contextlib.suppress(FileNotFoundError):
        os.chdir(start.cwd)
    if start.cpus:
        _pin_to(start.cpus)
