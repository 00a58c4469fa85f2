"""A run's ear for other processes of its user: `lp_pipe status`, `stop`, `stacks` talk to it."""

import contextlib
import logging
import os
import shutil
import socket
import threading
import time
from typing import Any

from lp_pipe.connections.shortage import told
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host
from lp_pipe.launch.processes.proctree import start_time
from lp_pipe.launch.processes.socket_dir import make_socket_dir
from lp_pipe.launch.registry import Entry, RunRecord
from lp_pipe.rpc import Server

_LAST_ANSWERS_S = 5.0  # a limit: answers take milliseconds, and longer on a machine that does other things

_log = logging.getLogger(__name__)


class Control:
    """What may be asked, over a connection that only this user can make; of each connection one thing at a time."""

    def __init__(self, coordinator: Coordinator, host: Host) -> None:
        self._coordinator = coordinator
        self._host = host
        self._is_over = threading.Event()

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """As Run.status(), and each node's "host"."""
        hosts = {spec.name: self._host.where(spec.node_id) for spec in self._coordinator.plan.nodes}
        return {
            label: [{**row, "host": hosts[f"{label}/{index}"]} for index, row in enumerate(rows)]
            for label, rows in self._coordinator.status().items()
        }

    def stop(self) -> dict[str, list[dict[str, Any]]]:
        """Stop in order; the last status, once nothing of the run is left."""
        self._coordinator.request_stop()
        self._is_over.wait()
        return self._coordinator.status()

    def stacks(self) -> str:
        """As Run.stacks()."""
        return self._host.stacks()

    def is_over(self) -> None:
        self._is_over.set()


class ControlPoint:
    """Makes a run known and answers for it, from `open` to `close`.

    Costs two small files, one socket and one thread: 4 ms on a busy laptop, where process mode takes 200 to launch.
    A run that cannot be made known (no home, full disk) is launched all the same, with a warning.
    """

    def __init__(self, coordinator: Coordinator, host: Host, mode: str) -> None:
        self._coordinator = coordinator
        self._host = host
        self._mode = mode
        self._control = Control(coordinator, host)
        self._server: Server | None = None
        self._entry: Entry | None = None
        self._own_dir = ""

    def open(self) -> None:
        """Called once the host has started: only then the run has its mark."""
        try:
            if not self._host.socket_dir:
                self._own_dir = make_socket_dir()
            folder = self._host.socket_dir or self._own_dir
            self._server = Server(self._control, f"unix:{folder}/control", thread_pool_size=0, name="control")
            self._entry = Entry(self._record(folder))
        except (OSError, RuntimeError) as error:  # no folder, descriptors or threads
            _log.warning("this run cannot be found by `lp_pipe status`, `stop` and `ps`: %s", told(error))

    def close(self) -> None:
        """Nothing of the run is left: who waits for that gets an answer."""
        self._control.is_over()
        if self._entry is not None:
            self._entry.end(time.time())
        if self._server is not None:
            self._server.close(grace_s=_LAST_ANSWERS_S)
        if self._own_dir:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._own_dir)

    def _record(self, folder: str) -> RunRecord:
        plan = self._coordinator.plan
        return RunRecord(
            program=plan.program,
            mode=self._mode,
            run_dir=str(plan.run_dir),
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_started=start_time(os.getpid()),
            started=time.time(),
            control=f"unix:{folder}/control",
            socket_dir=folder,
            mark=self._host.mark,
        )
