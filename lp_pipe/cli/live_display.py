"""The live display on a terminal: a table of nodes with their newest metrics; log lines scroll by above it."""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lp_pipe.cli.display import Display, Start, Status, number
from lp_pipe.cli.output import Output, labelled
from lp_pipe.telemetry.console import cut
from lp_pipe.telemetry.sink_threads import MetricsRecord
from lp_pipe.telemetry.terminal_lines import Unfinished

MAX_ROWS_PER_GROUP = 8
_MAX_UNFINISHED, _ROWS_OF_A_NODE = 8, 4
_ECHO_COLUMNS = 5  # free columns right of the panel, for an echoed ^C: in a row of its own it would stay on the screen
_BORDER_COLUMNS = 4
_REFRESHES_PER_S = 5
_COLORS = {
    "starting": "yellow",
    "restarting": "yellow",
    "waiting": "yellow",
    "running": "green",
    "finished": "blue",
    "stopped": "blue",
    "failed": "bold red",
}


class LiveDisplay(Display):
    """A display that is redrawn in place at the bottom of the terminal; the nodes' output scrolls above it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._suspending = threading.Lock()
        self._progress: dict[str, _Progress] = {}
        self._status: Status = {}
        self._unfinished: dict[tuple[str | None, str], list[str]] = {}  # by node and stream: progress bars, prompts
        self._title = ""
        self._began = time.monotonic()
        self._console = Console(file=sys.stdout)  # the terminal itself: the display replaces sys.stdout
        self._streams = sys.stdout, sys.stderr
        self._live = self._made(is_redirecting=True)

    def starting(self, start: Start) -> None:
        super().starting(start)
        self._title = f"{start.view.program} · {start.mode} mode"
        self._began = time.monotonic()
        self._live.start()

    def metrics(self, record: MetricsRecord) -> None:
        with self._lock:
            self._progress.setdefault(record.node, _Progress()).add(record)

    @contextlib.contextmanager
    def output(self) -> Iterator[Output]:
        before = sys.stdin
        with labelled(self._unfinish) as output:
            if before is not None and before.isatty():
                sys.stdin = _TerminalStdin(before, output, self.suspended)
            try:
                yield output
            finally:
                sys.stdin = before

    def status(self, status: Status) -> None:
        self._status = status

    def _unfinish(self, stream: str, node: str | None, unfinished: Unfinished) -> None:
        rows = unfinished.text.decode(errors="replace").split("\n")
        with self._lock:
            self._unfinished.pop((node, stream), None)
            if unfinished.text:
                self._unfinished[node, stream] = rows[-_ROWS_OF_A_NODE:]

    @contextlib.contextmanager
    def suspended(self) -> Iterator[TextIO]:
        with self._suspending:
            streams = sys.stdout, sys.stderr  # stopping the display would replace them
            self._live.transient = True
            self._live.stop()
            sys.stdout, sys.stderr = streams
            try:
                yield self._streams[0]
            finally:
                self._live = self._made(is_redirecting=False)
                self._live.start()

    def close(self) -> None:
        self._live.transient = not self._status  # remove the empty table of a launch that failed
        with contextlib.suppress(OSError):  # the terminal was closed
            self._live.stop()
        sys.stdout, sys.stderr = self._streams

    def _made(self, *, is_redirecting: bool) -> Live:
        return Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=is_redirecting,
            redirect_stderr=is_redirecting and self._streams[1].isatty(),
        )

    def _render(self) -> RenderableType:
        with self._lock:
            bars = [_bar(node, progress) for node, progress in self._progress.items() if progress.total_steps]
            table = _table(self._status, self._progress)
            unfinished = list(self._unfinished.items())
        columns = self._console.width - _ECHO_COLUMNS
        elapsed = _minutes(time.monotonic() - self._began)
        return Panel(
            Group(table, *bars, *_unfinished_rows(unfinished, columns - _BORDER_COLUMNS)),
            title=Text(f"{self._title} · {elapsed}"),
            title_align="left",
            border_style="dim",
            width=columns,
        )


class _TerminalStdin(io.TextIOBase):
    """The stdin of nodes that are threads: breakpoint() and input() suspend the display while they wait for a line."""

    def __init__(
        self, terminal: TextIO, output: Output, suspended: Callable[[], AbstractContextManager[TextIO]]
    ) -> None:
        self._terminal = terminal
        self._output = output
        self._suspended = suspended

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal.fileno()

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        prompt = self._output.stdout.take_unfinished()
        with self._suspended() as stdout:
            stdout.write(prompt)
            stdout.flush()
            return self._terminal.readline()


class _Progress:
    """The newest value of each metric of a node, and its progress towards `total_steps`."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.step: int | None = None
        self.total_steps = 0.0
        self._first: tuple[float, int] | None = None
        self._last = 0.0

    def add(self, record: MetricsRecord) -> None:
        self.values.update(record.values)
        self.total_steps = self.values.pop("total_steps", self.total_steps)
        if record.step is not None:
            self.step, self._last = record.step, record.time
            self._first = self._first or (record.time, record.step)

    def remaining_s(self) -> float | None:
        """Return the seconds left, at the mean speed since the first record."""
        if self._first is None or self.step is None or self.step <= self._first[1]:
            return None
        seconds_per_step = (self._last - self._first[0]) / (self.step - self._first[1])
        return max(0.0, self.total_steps - self.step) * seconds_per_step


def _table(status: Status, progress: dict[str, _Progress]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    for name in ("node", "state", "pid", "up"):
        is_number = name in ("pid", "up")
        table.add_column(name, no_wrap=True, justify="right" if is_number else "left", min_width=5)
    table.add_column("metrics", ratio=1)
    for label, rows in status.items():
        if len(rows) > MAX_ROWS_PER_GROUP:
            table.add_row(Text(f"{label} x {len(rows)}"), _counted(rows), "", "", _newest_of_group(label, progress))
            continue
        for index, row in enumerate(rows):
            name = f"{label}/{index}"
            state = Text(row["state"], style=_COLORS.get(row["state"], ""))
            up = "" if row["uptime_s"] is None else _minutes(row["uptime_s"])
            table.add_row(Text(name), state, str(row["pid"] or ""), up, _values(progress.get(name)))
    return table


def _counted(rows: list[dict[str, object]]) -> Text:
    states = [str(row["state"]) for row in rows]
    parts = [(f"{states.count(state)} {state} ", _COLORS.get(state, "")) for state in dict.fromkeys(states)]
    return Text.assemble(*parts)


def _newest_of_group(label: str, progress: dict[str, _Progress]) -> Text:
    known = [(name, item) for name, item in progress.items() if name.rpartition("/")[0] == label]
    if not known:
        return Text()
    name, newest = max(known, key=lambda pair: pair[1].step or 0)
    return Text.assemble((f"{name}  ", "dim"), _values(newest))


def _values(progress: _Progress | None) -> Text:
    if progress is None:
        return Text()
    step = [] if progress.step is None else [("step", float(progress.step))]
    text = Text()
    for name, value in [*step, *progress.values.items()]:  # a metric may also be called "step"
        text.append(f"{name}\N{NO-BREAK SPACE}", style="dim").append(number(value), style="bold").append("  ")
    return text


def _bar(node: str, progress: _Progress) -> Table:
    step = progress.step or 0
    remaining = progress.remaining_s()
    left = "" if remaining is None else f"{_minutes(remaining)} left"
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(
        Text(node),
        ProgressBar(total=progress.total_steps, completed=step, complete_style="cyan"),
        f"{step}/{progress.total_steps:.0f} {left}",
    )
    return row


def _unfinished_rows(unfinished: list[tuple[tuple[str | None, str], list[str]]], columns: int) -> list[Text]:
    """Return a row for each unfinished line."""
    rows = []
    for (node, _), lines in unfinished[:_MAX_UNFINISHED]:
        label = "" if node is None else f"[{node}] "
        rows += [Text(cut(f"{label}{line}", columns), no_wrap=True) for line in lines]
    if len(unfinished) > _MAX_UNFINISHED:
        rows.append(Text(f"and {len(unfinished) - _MAX_UNFINISHED} more unfinished lines", style="dim"))
    return rows


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
