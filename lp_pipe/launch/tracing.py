"""The trace of a run: tells every process to record, and writes what they send into one file."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lp_pipe.context import NodeContext
from lp_pipe.errors import NotSupported
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host
from lp_pipe.launch.supervision.messages import SpansRecorded
from lp_pipe.launch.trace_file import TraceFile
from lp_pipe.telemetry import tracing
from lp_pipe.telemetry.tracing import TraceBatch

_LAST_SPANS_S = 3.0  # for processes to send what is left
_LAUNCHER = "launcher"


class TraceEnd(NamedTuple):
    """The contents of a trace. num_left_out: spans for which there was no room."""

    num_steps: int
    seconds: float
    num_left_out: int


class Tracer:
    """Writes the spans of all nodes while it is on. A run has one; any thread may call the methods."""

    def __init__(self, coordinator: Coordinator, host: Host) -> None:
        self._coordinator = coordinator
        self._host = host
        self._changed = threading.Condition()
        self._file: TraceFile | None = None
        self._began = 0.0
        self._to_come: set[str] = set()  # nodes that have not sent their last spans
        self._offsets: dict[str, float] = {}  # by host

    def begin(self, path: Path) -> None:
        """Record from now on, into a new file.

        Raises:
            NotSupported: the run, or another one in this process, is traced already.
            OSError: the file cannot be written.
        """
        nodes = [spec.node_id for spec in self._coordinator.plan.nodes]
        self._offsets = {host: self._host.clock_offset(host) for host in {self._host.where(node) for node in nodes}}
        with self._changed:
            if self._file is not None or tracing.recorder is not None:
                raise NotSupported(f"trace into {path}: another trace of this process is in progress: wait for its end")
            self._began = time.monotonic()
            self._file = TraceFile(path, self._began)
        self._coordinator.spans_to(self.take)
        tracing.begin(self._take_own)
        self._host.set_tracing(True)

    def wait_for_steps(self, count: int, timeout_s: float) -> None:
        """Wait until so many steps are complete, the time is over, or the trace has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._file is None or self._file.num_steps >= count, timeout_s)

    def end(self) -> TraceEnd:
        """Get what processes have recorded, and close the file; idempotent."""
        names = set(self._host.nodes_here().values())
        running = {node for node, state in self._coordinator.states().items() if state == "running"}
        with self._changed:
            if self._file is None:
                return TraceEnd(0, 0.0, 0)
            self._to_come = running - names
        self._host.set_tracing(False)
        tracing.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._to_come, _LAST_SPANS_S)
            file, self._file = self._file, None
            self._coordinator.spans_to(None)
            file.close()
            self._changed.notify_all()
            return TraceEnd(file.num_steps, time.monotonic() - self._began, file.num_left_out)

    def take(self, node_id: str, message: SpansRecorded) -> None:
        """Write what a node's process has sent."""
        offset_s = self._offsets.get(self._host.where(node_id), 0.0)
        with self._changed:
            if self._file is not None:
                self._file.add(node_id, message.batch, offset_s)
                if message.batch.is_last:
                    self._to_come.discard(node_id)
                self._changed.notify_all()

    def _take_own(self, batches: Mapping[NodeContext | None, TraceBatch]) -> None:
        """Write what threads of this process have done, which are nodes in thread mode."""
        names = self._host.nodes_here()
        with self._changed:
            for node, batch in batches.items():
                name = _LAUNCHER if node is None else names.get(node.services)
                if self._file is not None and name is not None and (batch.spans or batch.num_lost):
                    self._file.add(name, batch)
            self._changed.notify_all()
