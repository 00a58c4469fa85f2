"""What is printed while a run is on, line by line, with the node that it comes from."""

import io
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lp_pipe.context import current_context

# Stream ("stdout" or "stderr"), node or None, line without its end.
OnLine = Callable[[str, str | None, str], None]
_LABELLED = re.compile(r"\[(?P<node>[^\]]+/[\d.]+)\] (?P<line>.*)")


class LineStream(io.TextIOBase):
    """A text stream that passes on whole lines. Every thread has its own unfinished line: nodes may be threads."""

    def __init__(self, name: str, on_line: OnLine) -> None:
        self._name = name
        self._on_line = on_line
        self._unfinished = threading.local()

    def write(self, text: str) -> int:
        *lines, rest = (getattr(self._unfinished, "text", "") + text).split("\n")
        self._unfinished.text = rest
        for line in lines:
            self._pass_on(line)
        return len(text)

    def writable(self) -> bool:
        return True

    def _pass_on(self, line: str) -> None:
        node = current_context()
        if node is not None:
            self._on_line(self._name, node.name, line)
            return
        labelled = _LABELLED.fullmatch(line)  # the form in which a node's process is heard
        if labelled:
            self._on_line(self._name, labelled["node"], labelled["line"])
        else:
            self._on_line(self._name, None, line)


@contextmanager
def redirected(on_line: OnLine) -> Iterator[None]:
    """Send all lines of sys.stdout and sys.stderr to `on_line` instead."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = LineStream("stdout", on_line), LineStream("stderr", on_line)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def labelled() -> Iterator[None]:
    """Put the node's label before each line that a node which is a thread prints, as node processes have it.

    Nor does a node fail because nobody reads any more (`| head`, a closed terminal, a full disk), as they do not.
    """
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}

    def write(stream: str, node: str | None, line: str) -> None:
        with suppress(OSError):
            streams[stream].write(f"[{node}] {line}\n" if node else f"{line}\n")
            streams[stream].flush()

    with redirected(write):
        yield
