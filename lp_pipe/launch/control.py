"""The server that answers `lp_pipe status`, `stop`, `stacks` and `ui` for a run."""

import contextlib
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.connections.socket_dir import make_socket_dir
from lp_pipe.graph import GraphView
from lp_pipe.launch.cleanup import prune_entries
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.edge_traffic import Traffic, traffic_of
from lp_pipe.launch.hangs.hang_watch import HangWatch
from lp_pipe.launch.host import Host
from lp_pipe.launch.invocation import current_folder, current_invocation, git_state, versions
from lp_pipe.launch.run_records import Entry, Outcome, RunRecord, record_in
from lp_pipe.launch.tracing import TraceEnd, Tracer
from lp_pipe.launch.watching import watch
from lp_pipe.process_tree import start_time, terminal_of
from lp_pipe.program import Program
from lp_pipe.rpc import Server
from lp_pipe.telemetry.events import EventLog
from lp_pipe.telemetry.file_writing import write_atomically

_LAST_ANSWERS_S = 5.0  # a limit: answers take milliseconds, and longer on a machine that does other things

_NOT_LAUNCHED = Outcome("not launched", 3)

_log = logging.getLogger(__name__)


class Control:
    """The rpc interface of a run, at a socket that only this user can reach; each connection has one call at a time.

    is_over: set when nothing of the run is left.
    """

    def __init__(
        self, coordinator: Coordinator, host: Host, hangs: HangWatch, tracer: Tracer, is_over: threading.Event
    ) -> None:
        self._coordinator = coordinator
        self._host = host
        self._hangs = hangs
        self._tracer = tracer
        self._is_over = is_over

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """Return Run.status(), with the "host" of each node."""
        hosts = {spec.name: self._host.where(spec.node_id) for spec in self._coordinator.plan.nodes}
        return {
            label: [{**row, "host": hosts[f"{label}/{index}"]} for index, row in enumerate(rows)]
            for label, rows in self._coordinator.status().items()
        }

    def stop(self) -> dict[str, list[dict[str, Any]]]:
        """Stop in order; return the last status once nothing of the run is left."""
        self._coordinator.request_stop(from_outside=True)
        self._is_over.wait()
        return self._coordinator.status()

    def stacks(self) -> str:
        """Return Run.stacks()."""
        return self._host.stacks()

    def traffic(self) -> list[Traffic]:
        """Return what has gone along each edge, as the processes said last."""
        return traffic_of(self._hangs.views(), self._coordinator.plan.owners)

    def watch(self, since: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield what Run.watch() does."""
        yield from watch(self._coordinator, self._hangs, self._is_over.wait, since)

    def trace(self, path: str, steps: int, limit_s: float) -> TraceEnd:
        """Record what all nodes do until so many steps are complete, or for `limit_s` seconds, into a file.

        Raises:
            NotSupported: the run is traced already.
            OSError: the file cannot be written.
        """
        self._tracer.begin(Path(path))
        try:
            self._tracer.wait_for_steps(steps, limit_s)
        finally:
            end = self._tracer.end()
        return end


class ControlPoint:
    """Keeps the records of a run in its folder, from `begin` to `close`; of a listed one also answers for it.

    Costs a few small files; where the run is listed one socket and one thread more: 4 ms on a busy laptop, where
    process mode takes 200 to launch. A run that cannot be made known (no home, full disk) is launched all the same,
    with a warning.
    """

    def __init__(
        self,
        program: Program,
        mode: str,
        coordinator: Coordinator,
        host: Host,
        hangs: HangWatch,
        tracer: Tracer,
        is_listed: bool,
    ) -> None:
        self._program = program
        self._mode = mode
        self._coordinator = coordinator
        self._host = host
        self._is_listed = is_listed
        self._folder = coordinator.plan.folder
        self._invocation = current_invocation()
        self._parent = record_in(self._folder.path)
        self._events = EventLog(self._folder.events)
        self._is_over = threading.Event()
        self._control = Control(coordinator, host, hangs, tracer, self._is_over)
        self._server: Server | None = None
        self._entry: Entry | None = None
        self._own_dir = ""
        self._has_started = False
        self._sources = threading.Thread(target=self._record_sources, name="record of the run", daemon=True)

    def begin(self) -> None:
        """Begin the events and write the graph; called before the host starts, because its nodes have events, too."""
        self._events.write("start", program=self._program.name, mode=self._mode, pid=os.getpid())
        self._coordinator.keep_events(self._events)
        with contextlib.suppress(OSError):  # the graph only documents the run: no reason to end it
            write_atomically(self._folder.graph, GraphView.of(self._program, self._mode).to_json())

    def open(self) -> None:
        """Make the run known; called once the host has started: only then the run has its mark."""
        self._has_started = True
        try:
            folder = self._listen() if self._is_listed else ""
            self._entry = Entry(self._record(folder))
            self._sources.start()
        except (OSError, RuntimeError) as error:  # no folder, descriptors or threads
            if self._is_listed:
                _log.warning("this run cannot be found by `lp_pipe status`, `stop` and `ps`: %s", describe_error(error))

    def close(self, outcome: Outcome) -> None:
        """Record the end, once nothing of the run is left, and answer the commands that wait for it."""
        self._is_over.set()
        if self._sources.ident is not None:
            self._sources.join()
        if not self._has_started:
            outcome = _NOT_LAUNCHED
        self._coordinator.note_event("end", None, **outcome._asdict())
        self._events.close()
        if self._entry is not None:
            self._entry.end(time.time(), outcome)
        if self._server is not None:
            self._server.close(grace_s=_LAST_ANSWERS_S)
        if self._own_dir:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._own_dir)

    def _listen(self) -> str:
        """Return the folder that the socket is in."""
        prune_entries()
        if not self._host.socket_dir:
            self._own_dir = make_socket_dir()
        folder = self._host.socket_dir or self._own_dir
        self._server = Server(self._control, f"unix:{folder}/control", thread_pool_size=0, name="control")
        return folder

    def _record_sources(self) -> None:
        """Add what takes a while to find out, while the nodes run."""
        if self._entry is not None:
            self._entry.add(versions=versions(), git=git_state())

    def _record(self, socket_dir: str) -> RunRecord:
        plan, pid = self._coordinator.plan, os.getpid()
        return RunRecord(
            program=plan.program,
            mode=self._mode,
            run_dir=str(plan.run_dir),
            host=socket.gethostname(),
            pid=pid,
            pid_started=start_time(pid),
            started=time.time(),
            control=f"unix:{socket_dir}/control" if socket_dir else "",
            socket_dir=socket_dir,
            mark=self._host.mark,
            argv=list(self._invocation.argv),
            flags=self._invocation.flags,
            cwd=current_folder(),
            terminal=terminal_of(pid),
            parent=self._parent.as_parent() if self._parent is not None else None,
        )
