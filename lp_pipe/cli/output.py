"""The output of a live run: lines and unfinished lines, each with the node that prints it."""

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lp_pipe.context import current_context
from lp_pipe.telemetry.console import Console
from lp_pipe.telemetry.terminal_lines import TerminalLines, Unfinished

# Called with the stream ("stdout" or "stderr"), the node or None, and a line without its newline.
OnLine = Callable[[str, str | None, str], None]
# The same with an unfinished line.
OnUnfinished = Callable[[str, str | None, Unfinished], None]


class LineStream(io.TextIOBase):
    """A text stream that passes on whole lines; as a NodeOutputStream it also takes those of node processes.

    Every thread has its own unfinished line, because nodes may be threads. `look` passes these on.
    """

    def __init__(self, name: str, on_line: OnLine, on_unfinished: OnUnfinished) -> None:
        self._name = name
        self._on_line = on_line
        self._on_unfinished = on_unfinished
        self._lock = threading.Lock()
        self._lines: dict[tuple[str | None, int], TerminalLines] = {}  # by node and thread

    def write(self, text: str) -> int:
        node = current_context()
        name = node.name if node is not None else None
        with self._lock:
            lines = self._lines.setdefault((name, threading.get_ident()), TerminalLines())
            finished = lines.feed(text.encode(errors="replace"), time.monotonic())
        self._pass_on(name, finished)
        return len(text)

    def writable(self) -> bool:
        return True

    def node_lines(self, node_id: str, lines: list[str]) -> None:
        for line in lines:
            self._on_line(self._name, node_id, line)

    def node_unfinished(self, node_id: str, unfinished: Unfinished) -> None:
        self._on_unfinished(self._name, node_id, unfinished)

    def look(self) -> None:
        """Pass on the threads' unfinished lines, if they have changed; called several times a second."""
        with self._lock:
            found = [(node, lines.look(time.monotonic())) for (node, _), lines in self._lines.items()]
        for node, (finished, unfinished) in found:
            self._pass_on(node, finished)
            if unfinished is not None:
                self._on_unfinished(self._name, node, unfinished)

    def take_unfinished(self) -> str:
        """Remove and return the calling thread's unfinished line, such as a prompt."""
        node = current_context()
        with self._lock:
            lines = self._lines.pop((node.name if node is not None else None, threading.get_ident()), None)
        left = lines.close() if lines is not None else []
        return left[-1].decode(errors="replace") if left else ""

    def end(self) -> None:
        """Pass on the threads' unfinished lines as finished."""
        with self._lock:
            left, self._lines = self._lines, {}
        for (node, _), lines in left.items():
            self._pass_on(node, lines.close())

    def _pass_on(self, node: str | None, lines: list[bytes]) -> None:
        for line in lines:
            self._on_line(self._name, node, line.decode(errors="replace"))


class Output:
    """The two streams that replace sys.stdout and sys.stderr."""

    def __init__(self, on_line: OnLine, on_unfinished: OnUnfinished) -> None:
        self.stdout = LineStream("stdout", on_line, on_unfinished)
        self.stderr = LineStream("stderr", on_line, on_unfinished)

    def look(self) -> None:
        """Call `look` of both streams."""
        self.stdout.look()
        self.stderr.look()


def ignore_unfinished(stream: str, node: str | None, unfinished: Unfinished) -> None:
    """Do nothing; for callers that want only whole lines."""


@contextmanager
def redirected(on_line: OnLine, on_unfinished: OnUnfinished = ignore_unfinished) -> Iterator[Output]:
    """Send all lines of sys.stdout and sys.stderr to `on_line` instead."""
    before = sys.stdout, sys.stderr
    output = Output(on_line, on_unfinished)
    sys.stdout, sys.stderr = output.stdout, output.stderr
    try:
        yield output
    finally:
        sys.stdout, sys.stderr = before
        output.stdout.end()
        output.stderr.end()


@contextmanager
def labelled(on_unfinished: OnUnfinished | None = None) -> Iterator[Output]:
    """Put a node's label before each line that its thread prints, as for nodes that are processes.

    As there, a node does not fail if its output cannot be written (`| head`, a closed terminal, a full disk).
    on_unfinished: None: show unfinished lines in the terminal's last row.
    """
    console = Console(sys.stdout, sys.stderr)

    def write(stream: str, node: str | None, line: str) -> None:
        console.write(node, stream == "stderr", [line])
        console.flush()
        if on_unfinished is not None:
            on_unfinished(stream, node, Unfinished(b"", False))

    def show(stream: str, node: str | None, unfinished: Unfinished) -> None:
        console.show(node, stream == "stderr", unfinished.text.decode(errors="replace"), unfinished.is_settled)
        console.flush()

    with redirected(write, on_unfinished or show) as output:
        yield output
