"""The context of a running node: its label and resources, its stop event, and the services of its launcher."""

import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lp_pipe.membership import Membership
from lp_pipe.resources import Resources


class NodeServices(Protocol):
    """The launcher's services for a node, with one implementation per launch mode. Addresses are named by their id."""

    def endpoint_for(self, address: str) -> str:
        """Return where the owner of `address` listens, or will; RuntimeError when no node of the program owns it."""

    def register(self, address: str, endpoint: str) -> None:
        """Tell the program that the server of `address` accepts calls at `endpoint`."""

    def withdraw(self, address: str, is_failing: bool) -> None:
        """Tell the program that nothing listens at `address` any more.

        is_failing: the node fails; then this returns only when the launcher knows it.
        """

    def resolve(self, address: str) -> "Future[str]":
        """Return the endpoint of `address`, once its server has registered; Unavailable when its node failed.

        In a forked child, which would get no answer, the result is "" at once.
        """

    def reserve_port(self, address: str) -> str:
        """Return a "host:port" for a user's own server."""

    def first_failure(self) -> Exception | None:
        """Return the failure that has ended the program, for the launcher's clients, which do not get it otherwise."""

    def request_stop(self) -> None:
        """Ask for an ordered stop of the whole program; returns when the launcher knows it."""

    def inner_nodes_ended(self, colocation: str) -> "Future[str]":
        """Return a future that is done once all processes of a MultiProcessingColocation (by inner_id) have ended."""

    def stop_inner_nodes(self, colocation: str) -> None:
        """Stop those processes in order, without stopping the program."""

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        """Declare that the servers of `addresses` hold state of a checkpoint; returns when the launcher knows it.

        From now on such a server that was restarted has lost its state. The future is done, with the node's name, once
        one of the nodes fails and is to be restarted.
        """

    def has_lost_state(self, address: str) -> bool:
        """Return whether the server that is about to listen at `address` lacks the state that it had there."""

    def new_endpoint(self) -> str:
        """Return an endpoint at which this node may listen, and that is known only where it is told."""

    def meet(self, group: str, generation: int, endpoint: bytes) -> "Future[Membership]":
        """Return the members of this node's group, once all its live nodes have asked to meet.

        A node that is being restarted counts as live. The number of the new generation is the largest that was asked
        for, and larger than that of the last one. Unavailable when the program stops.

        endpoint: what the other members are told of this node.
        """

    def generation_over(self, group: str, generation: int) -> "Future[str]":
        """Return a future that is done, with the reason, once this generation of the group is over.

        It is when a member has ended, or a node of the group asks to meet.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Send numbers to the run's metrics file and displays."""

    def log_event(self, event: str, **facts: Any) -> None:
        """Append an event of this node to the run's events.jsonl; "resumed" also to metrics.jsonl, with its step.

        facts: of plain types, which JSON has.
        """


class CountsCalls(Protocol):
    """A server of the node, with the number of its calls."""

    calls: int


class StopSignal:
    """The stop of one node: an event, and the handlers that run once it is set."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.pid = os.getpid()  # of the process that the stop reaches
        self._handlers: list[_Handler] = []
        self._lock = threading.RLock()  # a signal handler may also add or remove a handler
        self._is_finished = False
        self._runner: threading.Thread | None = None
        self.handler_errors: list[BaseException] = []

    def set(self) -> None:
        """Set the event and run the handlers, in order of registration, in a thread of their own."""
        with self._lock:
            if self.event.is_set():
                return
            handlers, self._handlers = self._handlers, []
            self.event.set()
            self._runner = self._run_aside(handlers) if handlers else None
        if self._runner is None:
            self._run(handlers)

    def add(self, handler: Callable[[], object]) -> None:
        entry = (handler, current_context())
        with self._lock:
            if not self.event.is_set():
                if not self._is_finished:
                    self._handlers.append(entry)
                return
        self._run([entry])

    def remove(self, handler: Callable[[], object]) -> None:
        with self._lock:
            self._handlers = [entry for entry in self._handlers if entry[0] != handler]

    def finish(self, timeout_s: float | None = None) -> threading.Thread | None:
        """Wait for handlers that were started and drop the others, because the node's code has ended.

        Returns the thread that runs them if that takes longer.
        """
        # `set` sets the event before the runner exists: a node that waits for the event may be here in between
        with self._lock:
            self._is_finished = True
            self._handlers = []
            runner = self._runner
        if runner is None or runner is threading.current_thread():
            return None
        runner.join(timeout_s)
        return runner if runner.is_alive() else None

    def _run_aside(self, handlers: "list[_Handler]") -> threading.Thread | None:
        runner = threading.Thread(target=self._run, args=(handlers,), name="stop-handlers", daemon=True)
        try:
            runner.start()
        except RuntimeError:  # out of threads: the handlers must run all the same
            return None
        return runner

    def _run(self, handlers: "list[_Handler]") -> None:
        for handler, node in handlers:
            try:
                with entered(node) if node is not None else nullcontext():
                    handler()
            except BaseException as error:  # even SystemExit must not keep the other handlers from running
                self.handler_errors.append(error)


@dataclass(eq=False)
class NodeContext:
    """The running node as its own code sees it: what `context()` returns, also in threads that the node starts.

    label, index, group_size: its group, its position there from 0, and how many nodes the group has.
    resources: what its group was given. devices: the numbers of the GPUs that are this node's.
    run_dir: the folder for logs, metrics and checkpoints; on another host a temporary one, where no such folder can be.
    grace_s: seconds from the stop to SIGTERM. previous_end: of a restarted node, how its process before this one ended;
        "" if it reported its failure itself.
    """

    label: str
    index: int
    group_size: int
    resources: Resources
    run_dir: Path
    services: NodeServices = field(repr=False)
    devices: tuple[int, ...] = ()
    grace_s: float = 5.0
    previous_end: str = ""
    stop_signal: StopSignal = field(default_factory=StopSignal, repr=False)
    # What the node's own parts (servers of channels, files) need done when its code has ended, however it ended.
    exit_stack: ExitStack = field(default_factory=ExitStack, repr=False)
    servers: list[CountsCalls] = field(default_factory=list, repr=False)  # shared by the nodes inside a colocation
    # Applies to the calling thread what the script has set for its thread (torch's default device, numpy's errors).
    prepare_thread: Callable[[], None] = field(default=lambda: None, repr=False)
    # Whether the node's arguments were unpickled for this process alone, so that it may use them up.
    owns_arguments: bool = field(default=False, repr=False)

    @property
    def calls(self) -> int | None:
        """The number of calls that this node's servers have taken; None when it serves nothing (any more)."""
        servers = list(self.servers)
        return sum(server.calls for server in servers) if servers else None

    @property
    def is_stopping(self) -> bool:
        """Whether the node has been asked to stop."""
        return self.stop_signal.event.is_set()

    @property
    def name(self) -> str:
        return f"{self.label}/{self.index}"


# A stop handler, and the node that it belongs to: in thread mode it runs in the launcher's thread.
_Handler = tuple[Callable[[], object], NodeContext | None]

_current: contextvars.ContextVar[NodeContext] = contextvars.ContextVar("lp_pipe_node")
_process_context: NodeContext | None = None


def current_context() -> NodeContext | None:
    """Return the node that the calling thread belongs to, or None outside of nodes."""
    found = _current.get(None)
    if found is None:
        found = getattr(threading.current_thread(), "_lp_pipe_context", None)
    return found if found is not None else _process_context


def context_of_thread(thread: threading.Thread | None) -> NodeContext | None:
    """Return the node that another thread belongs to, or None; a node that it has `entered` is not known here."""
    return getattr(thread, "_lp_pipe_context", None) or _process_context


def context() -> NodeContext:
    """Return the node that the calling code runs in.

    Raises:
        RuntimeError: outside of a running node.
    """
    found = current_context()
    if found is None:
        raise RuntimeError("this works only inside a running node of a program, not at setup or in the launcher")
    return found


@contextmanager
def entered(node: NodeContext) -> Iterator[None]:
    """Run the body as `node`'s code, in this thread and in the threads that it starts."""
    _inherit_in_threads()
    token = _current.set(node)
    try:
        yield
    finally:
        _current.reset(token)


def enter_process(node: NodeContext) -> None:
    """Make the whole process belong to `node` (process modes)."""
    global _process_context
    _process_context = node


def _inherit_in_threads() -> None:
    """Let threads that node code starts know their node: Python 3.11's threads begin with an empty context."""
    if hasattr(threading.Thread.start, "_lp_pipe_original"):
        return
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        parent = current_context()
        if parent is not None and not hasattr(self, "_lp_pipe_context"):
            self._lp_pipe_context = parent  # type: ignore[attr-defined]
        original(self)

    start._lp_pipe_original = original  # type: ignore[attr-defined]
    threading.Thread.start = start  # type: ignore[method-assign]


def stop() -> None:
    """Ask for an ordered stop of the whole program; returns at once. In nodes only (else RuntimeError)."""
    context().services.request_stop()


def stop_event() -> threading.Event:
    """Return the event that is set when this node must stop. In nodes only (else RuntimeError)."""
    return context().stop_signal.event


def wait_for_stop(timeout: float | None = None) -> bool:
    """Block until the program stops, or `timeout` seconds passed; True when it stops. In nodes only.

    Raises:
        RuntimeError: outside of nodes; without a timeout in a process that the node has forked, which no stop reaches.
    """
    signal = context().stop_signal
    if timeout is None and signal.pid != os.getpid():
        raise RuntimeError(
            f"process {os.getpid()} was forked by the node's process {signal.pid}, which alone gets the stop: "
            "wait there, and tell this process (multiprocessing.Event)"
        )
    return signal.event.wait(timeout)


def register_stop_handler(handler: Callable[[], Any]) -> None:
    """Call `handler()` when this node must stop, before it counts as down; at once if it already stops.

    Handlers run in a thread of their own, in order of registration; one that raises keeps none of the others from it.
    In nodes only (else RuntimeError).
    """
    context().stop_signal.add(handler)


def unregister_stop_handler(handler: Callable[[], Any]) -> None:
    """Forget a handler; unknown handlers are ignored."""
    context().stop_signal.remove(handler)


def log_metrics(metrics: Mapping[str, float], step: int | None = None) -> None:
    """Record numbers under this node's name: in run_dir/metrics.jsonl and on the launcher's display.

    Arrays and tensors of one element are numbers as well.

    Raises:
        TypeError: it is no dict, a value is no number, a name no text, or the step no int; the same in every mode.
    """
    context().services.log_metrics(metrics, step)
