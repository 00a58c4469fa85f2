"""Displays of a running program: the base class, and plain lines for files and pipes."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from lp_pipe.cli.errors import DONE, NODE_FAILED, counted, status_of
from lp_pipe.cli.output import Output, labelled
from lp_pipe.cli.streams import say
from lp_pipe.errors import NodeError
from lp_pipe.graph import GraphView, to_text
from lp_pipe.launch import ElasticRun, Run
from lp_pipe.launch.report import closing_lines, run_folder
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.telemetry.sink_threads import MetricsRecord


@dataclass(frozen=True)
class Ending:
    """The end of a run.

    kind: "done", "failed" or "interrupted". text: ends with the run's folder and the command that resumes it.
    """

    kind: str
    exit_status: int
    text: str
    failure: NodeError | None = None

    @classmethod
    def done(cls, run: Run | ElasticRun, seconds: float) -> Self:
        return cls("done", DONE, f"done in {seconds:.1f} s; {run_folder(RunFolder(run.run_dir))}")

    @classmethod
    def failed(cls, error: NodeError) -> Self:
        return cls("failed", NODE_FAILED, error.report, error)

    @classmethod
    def interrupted(
        cls, run: Run | ElasticRun, interrupt: KeyboardInterrupt, seconds: float, failure: NodeError | None
    ) -> Self:
        """Return the end of an interrupted run.

        seconds: from the signal to the end of the last node. failure: the one that came before the signal, if any.
        """
        nodes = counted(sum(len(rows) for rows in run.status().values()), "node")
        end = closing_lines(RunFolder(run.run_dir))
        text = f"interrupted; {nodes} stopped in {seconds:.1f} s; {end}"
        if failure is not None:
            text = f"{failure.report.removesuffix(end)}{text}"
        return cls("interrupted", status_of(interrupt), text, failure)


Status = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Start:
    """A program that is about to be launched."""

    view: GraphView
    mode: str
    run_dir: Path


class Display:
    """The base of all displays. `launch` tells it how a run starts, continues and ends.

    Use it as a context manager, so that the terminal is restored after any error.
    """

    def starting(self, start: Start) -> None:
        """Show the graph and the run's folder."""
        say(f"{to_text(start.view)}\nrun folder {start.run_dir}", sys.stdout)

    def output(self) -> AbstractContextManager[Output]:
        """Return a context around the time in which nodes may print."""
        return labelled()

    def started(self) -> None:
        """Show that every node has been started."""

    def metrics(self, record: MetricsRecord) -> None:
        """Show numbers that a node has logged. Called from any thread."""

    def status(self, status: Status) -> None:
        """Show the states of the nodes; called several times a second in the main thread."""

    def note(self, text: str) -> None:
        """Show a message that the user must see now."""
        say(text)

    def ended(self, ending: Ending, status: Status) -> None:
        """Show how the run ended, failures and interruptions on stderr. The last line names the run's folder."""
        self.close()
        print(ending.text, file=sys.stderr if ending.exit_status else sys.stdout, flush=True)

    def suspended(self) -> AbstractContextManager[TextIO] | None:
        """Return a context in which the display is removed and the terminal can be written to; None: no terminal."""
        return None

    def close(self) -> None:
        """Restore the terminal; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PlainDisplay(Display):
    """A display of one line per record, at most every `every_s` seconds for each node and kind of record.

    The first and the last record are always printed. Records with the same metric names are of one kind, so that rare
    ones are not lost among frequent ones.
    """

    def __init__(self, every_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._stdout = sys.stdout  # the original stream: `output` replaces sys.stdout by one that adds labels
        self._lock = threading.Lock()
        self._printed_at: dict[tuple[str, frozenset[str]], float] = {}
        self._held_back: dict[tuple[str, frozenset[str]], MetricsRecord] = {}

    def metrics(self, record: MetricsRecord) -> None:
        kind = (record.node, frozenset(record.values))
        now = self._clock()
        with self._lock:
            if now - self._printed_at.get(kind, float("-inf")) < self._every_s:
                self._held_back[kind] = record
                return
            self._printed_at[kind] = now
            self._held_back.pop(kind, None)
            self._print(record)

    def close(self) -> None:
        with self._lock:
            for record in sorted(self._held_back.values(), key=lambda record: record.time):
                self._print(record)
            self._held_back.clear()

    def _print(self, record: MetricsRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader has ended; metrics.jsonl has all records
            self._stdout.write(f"{metrics_line(record)}\n")
            self._stdout.flush()


def metrics_line(record: MetricsRecord) -> str:
    """Return a line such as `trainer/0  step 120  loss 2.413  bits_per_char 3.48`."""
    values = dict(record.values)
    total = values.pop("total_steps", None)
    step = [] if record.step is None else [f"step {record.step}{f'/{total:.0f}' if total else ''}"]
    return "  ".join([record.node, *step, *(f"{name} {number(value)}" for name, value in values.items())])


def number(value: float) -> str:
    """Return a number with about four digits: 2.413, 0.0001234, 11200."""
    if abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
