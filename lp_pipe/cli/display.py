"""What who watches a run gets to see, while it runs; here the base, and plain lines for files and pipes."""

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

from lp_pipe.cli.ending import Ending
from lp_pipe.cli.output import Output, labelled
from lp_pipe.cli.streams import say
from lp_pipe.graph import GraphView, to_text
from lp_pipe.telemetry.metrics import MetricsRecord

Status = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Start:
    """What is about to be launched."""

    view: GraphView
    mode: str
    run_dir: Path


class Display:
    """The base of all displays: is told how one run begins, goes on and ends.

    Use it as a context manager, so that the terminal is given back whatever happens.
    """

    def starting(self, start: Start) -> None:
        """Show the graph, then the run's folder."""
        say(f"{to_text(start.view)}\nrun folder {start.run_dir}", sys.stdout)

    def output(self) -> AbstractContextManager[Output]:
        """Around the time in which nodes may print."""
        return labelled()

    def started(self) -> None:
        """Every node has been started."""

    def metrics(self, record: MetricsRecord) -> None:
        """A node has logged numbers. Called from any thread."""

    def status(self, status: Status) -> None:
        """How the nodes are; called several times a second in the main thread."""

    def note(self, text: str) -> None:
        """Something that the user must know now."""
        say(text)

    def ended(self, ending: Ending, status: Status) -> None:
        """The last words; failures and interruptions go to stderr. The last line says where the run's folder is."""
        self.close()
        print(ending.text, file=sys.stderr if ending.exit_status else sys.stdout, flush=True)

    def suspended(self) -> AbstractContextManager[TextIO] | None:
        """Return a context in which the display is away and the terminal can be written to; None: no terminal."""
        return None

    def close(self) -> None:
        """Give the terminal back, idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PlainDisplay(Display):
    """One line a record, at most every `every_s` seconds for each node and kind of record; first and last always.

    Records are of one kind when they have the same names: rare ones are not lost between frequent ones.
    """

    def __init__(self, every_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._stdout = sys.stdout  # as it is now: what a node's thread prints is labelled later on
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
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more; metrics.jsonl has everything
            self._stdout.write(f"{metrics_line(record)}\n")
            self._stdout.flush()


def metrics_line(record: MetricsRecord) -> str:
    """`trainer/0  step 120  loss 2.413  bits_per_char 3.48`."""
    values = dict(record.values)
    total = values.pop("total_steps", None)
    step = [] if record.step is None else [f"step {record.step}{f'/{total:.0f}' if total else ''}"]
    return "  ".join([record.node, *step, *(f"{name} {number(value)}" for name, value in values.items())])


def number(value: float) -> str:
    """Four digits of it: 2.413, 0.0001234, 11200."""
    if abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
