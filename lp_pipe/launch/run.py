"""The launched program as its launcher sees it, and the thread that supervises it."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lp_pipe.connections import fault_injection
from lp_pipe.errors import NodeError, Unavailable, add_note
from lp_pipe.handles import Handle
from lp_pipe.launch.at_exit import active_runs, failed_runs
from lp_pipe.launch.cleanup import remove_if_empty
from lp_pipe.launch.control import ControlPoint
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.debuggers import LocalDebuggers
from lp_pipe.launch.hangs.hang_watch import HangWatch
from lp_pipe.launch.host import Host, give_up
from lp_pipe.launch.open_metrics import OpenMetricsServer
from lp_pipe.launch.processes.execute import failure_from
from lp_pipe.launch.report import described_failure, save_failure, status_html
from lp_pipe.launch.run_records import Outcome
from lp_pipe.launch.services import EndedServices, LauncherServices
from lp_pipe.launch.signals import Interrupts, Latch
from lp_pipe.launch.tracing import Tracer
from lp_pipe.launch.watching import watch
from lp_pipe.launched import asking, publish, replace_published
from lp_pipe.program import Program
from lp_pipe.rpc.fork_guard import ForkGuard
from lp_pipe.telemetry.console import console
from lp_pipe.telemetry.metrics import MetricsLog
from lp_pipe.telemetry.names import name_list

_TERM_TO_KILL_S = 1.0
_NAMED_AT_MOST = 5
_LOOK_FOR_DEBUGGERS_S = 0.3
_SHOWN_EVERY_S = 1.0  # in a notebook

_log = logging.getLogger(__name__)


class Run:
    """A launched program, returned by `launch`. Use it as a context manager to be sure that the nodes are taken down.

    It belongs to the process that has launched it. In a forked child `stop` and the end of the `with` block do nothing,
    and what would ask the coordinator, of which the child has a dead copy, raises Unavailable; `client` works.

    has_raised_failure: whether `wait` or the end of the `with` block has raised the failure.
    has_faulty_connections: whether it was launched inside `lp_pipe.testing.faults.enabled()`.
    """

    def __init__(
        self,
        program: Program,
        coordinator: Coordinator,
        host: Host,
        metrics: MetricsLog,
        hangs: HangWatch,
        tracer: Tracer,
        open_metrics: OpenMetricsServer | None = None,
        control: ControlPoint | None = None,
        keeps_empty_folder: bool = True,
    ) -> None:
        self._program = program
        self._owner = ForkGuard()
        self._coordinator = coordinator
        self._host = host
        self._metrics = metrics
        self._control = control
        self._keeps_empty_folder = keeps_empty_folder
        self._hangs = hangs
        self._tracer = tracer
        self._open_metrics = open_metrics
        self._has_started = threading.Event()
        self._is_over = Latch()
        self._interrupts = Interrupts(lambda: coordinator.request_stop(hurry=True), host.suspend)
        self._services = LauncherServices(coordinator, host, self._interrupts.deferred)
        self._debuggers = LocalDebuggers(coordinator.plan.run_dir, console.suspended)
        self._script_error: BaseException | None = None  # the exception that has ended the script or the `with` body
        self.has_raised_failure = False
        self.has_faulty_connections = fault_injection.is_enabled()
        publish(coordinator.plan.owners, self._services)

    @property
    def run_dir(self) -> Path:
        """The folder with this run's logs, metrics and checkpoints."""
        return self._coordinator.plan.run_dir

    @property
    def metrics_url(self) -> str | None:
        """The address of the run's OpenMetrics; None without `metrics_port`."""
        return self._open_metrics.url if self._open_metrics is not None else None

    def start(self) -> None:
        """Start the nodes, and the thread that looks after them."""
        try:
            # A stop before all of this is done would wait for ever: nothing would take the nodes down.
            with self._interrupts.deferred():
                self._interrupts.install()  # first: a node may already run when its start returns
                self._start_supervising()
                self._start_nodes()
        except BaseException:
            if self in active_runs:  # a signal has come after the nodes were started
                self.stop()
            self._interrupts.uninstall()
            raise

    def _start_supervising(self) -> None:
        """Start the supervising thread, before the nodes: without it nothing would take them down."""
        try:
            threading.Thread(target=self._supervise, name=f"supervise {self._program.name}", daemon=True).start()
        except RuntimeError:
            give_up(self._coordinator, self._coordinator.states())
            self._finish()
            raise

    def _start_nodes(self) -> None:
        """Start all nodes; none is left when this raises."""
        try:
            if self._control is not None:
                self._control.begin()
            self._host.start()
            if self._control is not None:
                self._control.open()
            self._hangs.start()
            active_runs.add(self)
        except BaseException:
            self._coordinator.request_stop()
            self._has_started.set()
            self._is_over.wait()
            raise
        self._has_started.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every node is down.

        Raises:
            NodeError: the first failure; again on every later wait.
            TimeoutError: `timeout` seconds passed; the program goes on.
            KeyboardInterrupt: Ctrl+C or SIGTERM; raised once the nodes are down.
            Unavailable: this is a forked child of the process that has launched the program.
        """
        self._check_owner()
        try:
            is_over = self._wait_or_debug(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        if not is_over:
            up = ", ".join(self._coordinator.nodes_up())
            raise TimeoutError(f"program {self._program.name!r} still runs after {timeout} s: {up}")
        self._interrupts.uninstall()
        error = described_failure(self._coordinator, self._host)
        if error is not None:
            self.has_raised_failure = True
            failed_runs.discard(self)
            raise error

    def _wait_or_debug(self, timeout: float | None) -> bool:
        """Wait for the end, and lend a script's terminal to the debuggers of its nodes meanwhile; False: time is up."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        is_main = threading.current_thread() is threading.main_thread()
        while not self._is_over.wait(min(_LOOK_FOR_DEBUGGERS_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            if is_main:
                self._debuggers.look()
        return True

    def stop(self) -> None:
        """Stop the program in order, and return when nothing of it is left. Idempotent, any thread but a node's."""
        if not self._owner.is_here:
            return
        with self._interrupts.deferred():
            self._coordinator.request_stop(hurry=self._interrupts.is_impatient, from_outside=True)
            self._is_over.wait()
            self._interrupts.uninstall()
        failed_runs.discard(self)

    def request_stop(self, hurry: bool = False) -> bool:
        """Begin an ordered stop and return at once; return whether it is the first request, and nodes were up.

        hurry: without the grace period.
        """
        if not self._owner.is_here:
            return False
        with self._interrupts.deferred():
            return self._coordinator.request_stop(hurry, from_outside=True)

    def stop_unfinished(self, error: BaseException | None = None) -> None:
        """Request the stop for an interpreter that ends, and name the nodes that were up in a warning.

        error: the uncaught exception of the script.
        """
        self._script_error = error
        up = self._coordinator.nodes_up()
        if self.request_stop():
            names = ", ".join(up[:_NAMED_AT_MOST]) + (", …" if len(up) > _NAMED_AT_MOST else "")
            _log.warning(
                "the interpreter ends, so program %r is stopped while nodes are up: %s. "
                "Call wait() on what lp.launch(…) returns to wait for their end",
                self._program.name,
                names,
            )

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left."""
        return self._is_over.is_open

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """`{label: [{"state", "pid", "error", "uptime_s", "waiting", "restarts", "calls_per_s"}, ...]}`, one each.

        States: starting, running, restarting (down, and due to start again), finished, failed, stopped.
        error: the node's last failure, also when it runs again.
        waiting: what it has waited for longer than `hang_after`, "75 s for a reply of server/0.step()"; else None.
        calls_per_s: of its servers, over the last seconds; None for a node without any.
        A MultiProcessingColocation is one entry: failed when an inner node has, else running while one runs; the pid is
        that of the first one that runs, the restarts are the sum.
        """
        self._check_owner()
        return self._coordinator.status()

    def watch(self, since: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield what is new until the run is over: dicts with the "kind" states, event, metrics, live or end.

        states: the rows of `status` that have changed, by node; at first all. event and metrics: what is appended to
        events.jsonl and metrics.jsonl. live: long waits, and the traffic along each edge, once a second. end: the last.
        since: seconds since the epoch; events and metrics after that time come first. Nothing runs between two steps
        of the iterator.
        """
        self._check_owner()
        return watch(self._coordinator, self._hangs, self._is_over.wait, since)

    def _repr_html_(self) -> str:
        return status_html(self._program.name, self.run_dir, self._coordinator.status(), is_over=self.is_over)

    def _ipython_display_(self) -> None:
        """Show the nodes' states in a notebook, and keep them up to date until the run is over."""
        from IPython.display import HTML, display

        shown = display(HTML(self._repr_html_()), display_id=True)
        if shown is None or self.is_over:  # no notebook
            return

        def update() -> None:
            while not self._is_over.wait(_SHOWN_EVERY_S):
                shown.update(HTML(self._repr_html_()))
            shown.update(HTML(self._repr_html_()))

        threading.Thread(target=update, name=f"display of {self._program.name}", daemon=True).start()

    def client(self, handle_or_label: Handle[Any] | str, index: int = 0) -> Any:
        """A client of a node: what its handle dereferences to in the launcher, once its server is up.

        Raises:
            KeyError, IndexError: no such group, or not so many nodes in it.
            Unavailable: the node failed, or the program has ended.
        """
        if isinstance(handle_or_label, Handle):
            with asking(self._services):  # the program may have been launched once more since
                return handle_or_label.dereference()
        if handle_or_label not in self._program.groups:
            known = ", ".join(self._program.groups)
            raise KeyError(f"no group {handle_or_label!r} in program {self._program.name!r}; it has {known}")
        nodes = self._program.groups[handle_or_label]
        if not -len(nodes) <= index < len(nodes):
            raise IndexError(f"group {handle_or_label!r} has {len(nodes)} nodes; there is no index {index}")
        return self.client(nodes[index].create_handle())

    def stacks(self) -> str:
        """Return the stack of every thread of every node."""
        self._check_owner()
        return self._host.stacks()

    def last_lines(self, label: str, index: int) -> list[str]:
        """The last lines that a node (of a colocation: its part that failed, or its first) printed (process modes)."""
        self._check_owner()
        return self._host.last_lines(self._coordinator.main_part(f"{label}/{index}"))

    @property
    def interrupted_by(self) -> int | None:
        """The signal that ended the program (SIGINT, SIGTERM), or None."""
        return self._interrupts.received

    @property
    def failure(self) -> NodeError | None:
        """The first failure so far, without waiting for the end."""
        self._check_owner()
        return self._coordinator.failure()

    @property
    def later_failures(self) -> int:
        """How many failures came after the first one."""
        self._check_owner()
        return max(0, len(self._coordinator.failures()) - 1)

    def log_path(self, label: str, index: int) -> Path | None:
        """The file with all that a node (of a colocation: as `last_lines`) printed (process modes)."""
        self._check_owner()
        return self._host.log_path(self._coordinator.main_part(f"{label}/{index}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._owner.is_here:
            return
        self._script_error = error
        with (
            self._interrupts.deferred()
        ):  # a signal in the wait for a failure could leave the lock taken that the stop needs
            try:
                self._services.first_failure()  # else the stop would be the reason of processes that have died
            finally:
                self.stop()
        failure: NodeError | None = described_failure(self._coordinator, self._host)
        if failure is None:
            return
        if kind is None:
            self.has_raised_failure = True
            raise failure
        cause = str(failure).splitlines()[0]
        if isinstance(error, Unavailable) and cause not in str(error):
            add_note(error, f"the first failure of the program: {cause}")

    def _check_owner(self) -> None:
        """
        Raises:
            Unavailable: this is a forked child of the process that has launched the program.
        """
        self._owner.check(f"the run of program {self._program.name!r}", "use it there")

    def _supervise(self) -> None:
        self._has_started.wait()
        aside: list[threading.Thread] = []
        while (order := self._coordinator.next_order()) is not None:
            if order.is_restart:
                self._restart(order.node_ids[0])
            else:
                aside += self._take_down_aside(order.node_ids)
        self._hangs.close()
        try:
            self._take_down([spec.node_id for spec in self._coordinator.plan.nodes])
        finally:
            for thread in aside:
                thread.join()
            self._finish()

    def _finish(self) -> None:
        """Free everything; go on after an error, because `wait` must return."""
        parts: list[Callable[[], object]] = [
            self._coordinator.finish,
            # What is published is never freed, so it is one text for each address, not the program.
            lambda: replace_published(self._services, EndedServices(self._coordinator.why_gone(), self.failure)),
            self._tracer.close,
            self._close_open_metrics,
            self._host.close,
            self._metrics.close,
            lambda: save_failure(self._coordinator),
            self._close_control,
            self._interrupts.uninstall,
        ]
        for part in parts:
            try:
                part()
            except Exception:
                _log.exception("at the end of the program")
        if self in active_runs and self.failure is not None:  # else launch() raises
            failed_runs.add(self)
        self._is_over.open()
        active_runs.discard(self)

    def _close_open_metrics(self) -> None:
        if self._open_metrics is not None:
            self._open_metrics.close()

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close(self._outcome())
        if not self._keeps_empty_folder:
            remove_if_empty(self.run_dir)

    def _outcome(self) -> Outcome:
        failure = str(self.failure).partition("\n")[0] if self.failure is not None else ""
        if self.interrupted_by is not None:
            return Outcome("interrupted", 128 + self.interrupted_by, failure)
        if failure:
            return Outcome("failed", 1, failure)
        if isinstance(self._script_error, Exception) and self._coordinator.was_stopped_from_outside:
            return Outcome("failed", 1, f"the launching script: {failure_from(self._script_error).summary}")
        return Outcome("stopped" if self._coordinator.was_stopped_from_outside else "done", 0)

    def _restart(self, node_id: str) -> None:
        try:
            self._host.restart(node_id)
        except Exception as error:  # such as no more processes or descriptors: this attempt has failed
            self._coordinator.node_ended(node_id, failure_from(error))
            self._coordinator.node_down(node_id)

    def _take_down_aside(self, node_ids: Sequence[str]) -> list[threading.Thread]:
        helper = threading.Thread(target=self._take_down, args=(node_ids,), name="take down", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # out of threads: restarts wait until this is done
            self._take_down(node_ids)
            return []
        return [helper]

    def _take_down(self, node_ids: Sequence[str]) -> None:
        """Stop event -> grace period -> SIGTERM -> 1 s -> SIGKILL of what is left of these nodes."""
        ending = self._coordinator.still_ending
        self._host.stop_nodes(node_ids)  # also those that have ended: their handlers may wait for the stop
        if self._coordinator.wait_for_end(node_ids, self._coordinator.plan.grace_s):
            return
        late = ending(node_ids)
        if late and not self._interrupts.is_impatient:  # what they do at the stop, such as saving, is cut off
            _log.warning(
                "did not end within the grace of %g s after the stop: %s; processes get SIGTERM, threads are left",
                self._coordinator.plan.grace_s,
                name_list(late),
            )
        self._host.terminate(late)
        if self._coordinator.wait_for_end(node_ids, _TERM_TO_KILL_S):
            return
        self._host.kill(ending(node_ids))
        self._coordinator.wait_for_end(node_ids)
