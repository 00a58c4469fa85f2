"""The trace of a run: tells every process to record, and writes what they send into one file."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lp_pipe.context import NodeContext
from lp_pipe.errors import NotSupported
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host
from lp_pipe.launch.supervision.messages import SpansRecorded
from lp_pipe.telemetry import tracing
from lp_pipe.telemetry.otel import OpenTelemetryExporter
from lp_pipe.telemetry.tracing import TraceBatch

if TYPE_CHECKING:
    from lp_pipe.launch.trace_file import TraceFile

_LAST_SPANS_S = 3.0  # for processes to send what is left
_NEXT_SPANS_S = 0.5  # until processes that go on recording have sent what they have done
_LAUNCHER = "launcher"


class TraceEnd(NamedTuple):
    """The contents of a trace. num_left_out: spans for which there was no room."""

    num_steps: int
    seconds: float
    num_left_out: int


def check_is_not_traced(what: str, *, is_this: bool = False) -> None:
    """
    Raises:
        NotSupported: this process is traced already, for this run (`is_this`) or for another one.
    """
    if is_this or tracing.recorder is not None:
        raise NotSupported(f"{what}: another trace of this process is in progress: wait for its end")


class Tracer:
    """Writes the spans of all nodes while it is on. A run has one; any thread may call the methods."""

    def __init__(self, coordinator: Coordinator, host: Host) -> None:
        self._coordinator = coordinator
        self._host = host
        self._changed = threading.Condition()
        self._file: TraceFile | None = None
        self._exporter: OpenTelemetryExporter | None = None
        self._began = 0.0
        self._to_come: set[str] = set()  # nodes that have not sent their last spans
        self._offsets: dict[str, float] = {}  # by host

    def export_to(self, exporter: OpenTelemetryExporter) -> None:
        """Record until the end of the run, and give the spans to an exporter."""
        self._exporter = exporter
        self._record()

    def begin(self, path: Path) -> None:
        """Record from now on, into a new file.

        Raises:
            NotSupported: the run, or another one in this process, is traced already.
            OSError: the file cannot be written.
        """
        with self._changed:
            if self._exporter is None or self._file is not None:
                check_is_not_traced(f"trace into {path}", is_this=self._file is not None)
            self._began = time.monotonic()
            from lp_pipe.launch.trace_file import TraceFile  # it loads schedules

            self._file = TraceFile(path, self._began)
        if self._exporter is None:
            self._record()

    def _record(self) -> None:
        nodes = [spec.node_id for spec in self._coordinator.plan.nodes]
        self._offsets = {host: self._host.clock_offset(host) for host in {self._host.where(node) for node in nodes}}
        self._coordinator.spans_to(self.take)
        tracing.begin(self._take_own)
        self._host.set_tracing(True)

    def wait_for_steps(self, count: int, timeout_s: float) -> None:
        """Wait until so many steps are complete, the time is over, or the trace has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._file is None or self._file.num_steps >= count, timeout_s)

    def end(self) -> TraceEnd:
        """Get what processes have recorded, and close the file; idempotent."""
        if self._file is not None and self._exporter is None:
            self._stop_recording()
        elif self._file is not None:
            time.sleep(_NEXT_SPANS_S)
        with self._changed:
            file, self._file = self._file, None
            if file is None:
                return TraceEnd(0, 0.0, 0)
            file.close()
            self._changed.notify_all()
            return TraceEnd(file.num_steps, time.monotonic() - self._began, file.num_left_out)

    def close(self) -> None:
        """End everything, with the run."""
        exporter = self._exporter
        if exporter is not None:
            self._stop_recording()
            self._exporter = None
            exporter.close()
        self.end()

    def _stop_recording(self) -> None:
        names = set(self._host.nodes_here().values())
        running = {node for node, state in self._coordinator.states().items() if state == "running"}
        with self._changed:
            self._to_come = running - names
        self._host.set_tracing(False)
        tracing.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._to_come, _LAST_SPANS_S)
        self._coordinator.spans_to(None)

    def take(self, node_id: str, message: SpansRecorded) -> None:
        """Write what a node's process has sent."""
        offset_s = self._offsets.get(self._host.where(node_id), 0.0)
        with self._changed:
            self._write(node_id, message.batch, offset_s)
            if message.batch.is_last:
                self._to_come.discard(node_id)
            self._changed.notify_all()

    def _take_own(self, batches: Mapping[NodeContext | None, TraceBatch]) -> None:
        """Write what threads of this process have done, which are nodes in thread mode."""
        names = self._host.nodes_here()
        with self._changed:
            for node, batch in batches.items():
                name = _LAUNCHER if node is None else names.get(node.services)
                if name is not None and (batch.spans or batch.num_lost):
                    self._write(name, batch)
            self._changed.notify_all()

    def _write(self, node: str, batch: TraceBatch, offset_s: float = 0.0) -> None:
        if self._file is not None:
            self._file.add(node, batch, offset_s)
        if self._exporter is not None:
            self._exporter.add(node, batch, offset_s)
