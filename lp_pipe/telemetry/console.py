"""The launcher's standard streams, where the nodes' lines appear with their labels.

On a terminal unfinished lines (progress bars, prompts) share one row at the bottom, which changes in place. In a file
or a pipe an unfinished line is printed when it ends or has settled; what follows is then appended to it.
"""

import contextlib
import os
import re
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TextIO

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ERASE = "\r\x1b[K"
_DEFAULT_COLUMNS, _MIN_SHARE = 80, 24
_BETWEEN = " │ "


class Console:
    """The output of all nodes; may be called from any thread.

    stdout, stderr: None means the current sys.stdout and sys.stderr at each call.
    """

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._fixed = stdout, stderr
        self._lock = threading.Lock()
        self._unfinished: dict[tuple[str | None, bool], str] = {}  # by node and is_stderr; only on a terminal
        self._row: tuple[TextIO, str] | None = None  # the stream and text of the terminal's last row
        self._is_suspended = False
        # By is_stderr: node and text of a printed line that has not ended; only in files and pipes.
        self._begun: dict[bool, tuple[str | None, str]] = {}

    def write(self, node: str | None, is_stderr: bool, lines: list[str]) -> None:
        """Print finished lines; `flush` makes them visible."""
        target = self._stream(is_stderr)
        if target is None:
            return
        label = _label(node)
        text = "".join(f"{label}{line}\n" for line in lines)
        with self._lock:
            self._unfinished.pop((node, is_stderr), None)
            owner, begun = self._begun.pop(is_stderr, (None, ""))
            if begun:
                is_same = owner == node and lines[0].startswith(begun)
                text = text.removeprefix(label + begun) if is_same else f"\n{text}"
            self._erase()
            _print(text, target)

    def show(self, node: str | None, is_stderr: bool, text: str, is_settled: bool) -> None:
        """Show `text` as the node's unfinished output on this stream; "" removes it."""
        target = self._stream(is_stderr)
        if target is None:
            return
        with self._lock:
            if _is_terminal(target):
                self._unfinished[node, is_stderr] = text.rpartition("\n")[2]
                if not text:
                    del self._unfinished[node, is_stderr]
            elif is_settled:
                owner, begun = self._begun.get(is_stderr, (None, ""))
                whole = f"{_label(node)}{text}"
                if begun:
                    whole = text.removeprefix(begun) if owner == node and text.startswith(begun) else f"\n{whole}"
                self._begun[is_stderr] = node, text
                _print(whole, target)

    def flush(self) -> None:
        """Redraw the last row and flush both streams."""
        with self._lock:
            self._draw()
        for target in (self._stream(False), self._stream(True)):
            if target is not None:
                with contextlib.suppress(ValueError, OSError):  # the launcher has closed it
                    target.flush()

    def suspended(self) -> AbstractContextManager[TextIO] | None:
        """Return a context in which a debugger has the terminal and no unfinished line is drawn.

        None if stdout is not a terminal.
        """
        stdout = self._stream(False)
        return self._suspended_for(stdout) if stdout is not None and _is_terminal(stdout) else None

    @contextlib.contextmanager
    def _suspended_for(self, stdout: TextIO) -> Iterator[TextIO]:
        with self._lock:
            self._erase()
            self._is_suspended = True
        try:
            yield stdout
        finally:
            with self._lock:
                self._is_suspended = False

    def _stream(self, is_stderr: bool) -> TextIO | None:
        return self._fixed[is_stderr] or (sys.stderr if is_stderr else sys.stdout)

    def _erase(self) -> None:
        if self._row is not None:
            _print(_ERASE, self._row[0])
            with contextlib.suppress(ValueError, OSError):
                self._row[0].flush()  # the other stream may be the same terminal
            self._row = None

    def _draw(self) -> None:
        if not self._unfinished or self._is_suspended:
            self._erase()
            return
        is_stderr = next(reversed(self._unfinished))[1]
        target = self._stream(is_stderr)
        if target is None:
            return
        for other in (self._stream(False), self._stream(True)):
            if other is not None and other is not target:
                with contextlib.suppress(ValueError, OSError):
                    other.flush()  # its lines must appear above the row
        text = _in_one_row([(node, text) for (node, _), text in self._unfinished.items()], _columns(target) - 1)
        if self._row is None or self._row[0] is not target:
            self._erase()
        if self._row is None or self._row[1] != text:
            _print(f"\r{text}\x1b[K", target)
            self._row = target, text


console = Console()


def _label(node: str | None) -> str:
    return "" if node is None else f"[{node}] "


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
    except (OSError, ValueError):
        return _DEFAULT_COLUMNS


def _in_one_row(texts: list[tuple[str | None, str]], columns: int) -> str:
    """Return the texts side by side, each cut to an equal share of the columns, and how many did not fit."""
    fitting = max(1, min(len(texts), (columns + len(_BETWEEN)) // (_MIN_SHARE + len(_BETWEEN))))
    rest = f" +{len(texts) - fitting}" if len(texts) > fitting else ""
    share = (columns - len(rest) - (fitting - 1) * len(_BETWEEN)) // fitting
    return _BETWEEN.join(cut(f"{_label(node)}{text}", share) for node, text in texts[:fitting]) + rest


def cut(text: str, columns: int) -> str:
    """Return the beginning of a line that fits into `columns`, without colors and control characters."""
    text = _CONTROLS.sub("�", _ESCAPES.sub("", text).expandtabs())
    if text.isascii():
        return text[: max(0, columns)]
    used, shown = 0, []
    for letter in text:
        used += 0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if used > columns:
            break
        shown.append(letter)
    return "".join(shown)


def _print(text: str, target: TextIO) -> None:
    """Print; characters that the target's encoding does not have are escaped, so that no line is lost."""
    with contextlib.suppress(ValueError, OSError):  # the launcher has closed the stream, or its reader has ended
        try:
            target.write(text)
        except UnicodeEncodeError as error:
            target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
