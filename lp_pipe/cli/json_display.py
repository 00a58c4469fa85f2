"""The display of `--json`: every event is one line of JSON on stdout, and nothing else goes there."""

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from lp_pipe.cli.display import Display, Ending, Start, Status
from lp_pipe.cli.output import Output, redirected
from lp_pipe.cli.streams import say
from lp_pipe.telemetry.sink_threads import MetricsRecord


class JsonDisplay(Display):
    """A display that prints events as JSON.

    The events are graph, launched, log, metrics, note, node (its state at the end), then done, failed or interrupted; a
    dry run has graph and plan. Each has `event` and `time` (seconds since the epoch). Notes and failure reports are
    also printed to stderr as text.
    """

    def __init__(self) -> None:
        self._stdout = sys.stdout
        self._stderr = sys.stderr
        self._lock = threading.Lock()
        self._start: Start | None = None

    def starting(self, start: Start) -> None:
        self._start = start
        self._emit("graph", **start.view.to_dict())

    def planned(self, lines: Sequence[str]) -> None:
        """Print the lines that a dry run would print as text."""
        self._emit("plan", lines=list(lines))

    def output(self) -> AbstractContextManager[Output]:
        return redirected(self._log)

    def started(self) -> None:
        assert self._start is not None, "starting() comes first"
        self._emit(
            "launched",
            program=self._start.view.program,
            mode=self._start.mode,
            run_dir=str(self._start.run_dir.resolve()),
        )

    def metrics(self, record: MetricsRecord) -> None:
        values = {name: value if math.isfinite(value) else str(value) for name, value in record.values.items()}
        self._emit("metrics", time=record.time, node=record.node, step=record.step, values=values)

    def note(self, text: str) -> None:
        self._emit("note", text=text)
        say(text, self._stderr)

    def ended(self, ending: Ending, status: Status) -> None:
        for label, rows in status.items():
            for index, row in enumerate(rows):
                pid = row["pid"] or None
                self._emit("node", node=f"{label}/{index}", state=row["state"], pid=pid, error=row["error"])
        failure: dict[str, Any] = {}
        if ending.failure is not None:
            error = ending.failure
            failure = {"node": f"{error.label}/{error.index}", "type": error.type_name, "message": error.message}
            failure["traceback"] = error.remote_traceback
        run_dir = str(self._start.run_dir.resolve()) if self._start else None
        self._emit(ending.kind, exit_status=ending.exit_status, **failure, text=ending.text, run_dir=run_dir)
        if ending.exit_status:
            print(ending.text, file=self._stderr, flush=True)

    def _log(self, stream: str, node: str | None, line: str) -> None:
        self._emit("log", node=node, stream=stream, line=line)

    def _emit(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        with self._lock, contextlib.suppress(OSError, ValueError):  # the reader has ended
            print(line, file=self._stdout, flush=True)
