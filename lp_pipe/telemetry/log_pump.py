"""Read the nodes' output from their pipes and pass it on line by line; unfinished lines after a short delay."""

import logging
import os
import selectors
import threading
import time
from collections import deque

from lp_pipe.private_python import call_before_threads_are_joined
from lp_pipe.telemetry.log_files import LogOutput
from lp_pipe.telemetry.terminal_lines import TerminalLines
from lp_pipe.telemetry.tracebacks import MOST_LINES

_log = logging.getLogger(__name__)

_USUAL_LINES = 20
_READ_BYTES = 1 << 16
_WRITING_PATIENCE_S = 2.0
_LAST_LOOKS = 4  # reads at the end, for data that came while the output was blocked; a pipe may never be empty


class _Stream:
    """A pipe from a node."""

    def __init__(self, node_id: str, is_stderr: bool) -> None:
        self.node_id = node_id
        self.is_stderr = is_stderr
        self.lines = TerminalLines()


class LogPump:
    """A thread that reads the nodes' pipes, with `selector`. While `output` blocks, the nodes' prints block, too."""

    def __init__(self, output: LogOutput, selector: selectors.BaseSelector) -> None:
        self._output = output
        self._selector = selector
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._new: deque[tuple[int, _Stream]] = deque()
        self._waiting: dict[_Stream, float] = {}  # streams with unfinished lines, and when to look at each again
        self._last: dict[str, deque[str]] = {}
        self._open_pipes: dict[str, int] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="node logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add_node(self, node_id: str) -> tuple[int, int]:
        """Return descriptors for the node's stdout and stderr; the caller closes them once the node has its copies."""
        pipes = _two_pipes()
        with self._changed:
            self._last.setdefault(node_id, deque(maxlen=MOST_LINES))
            self._open_pipes[node_id] = self._open_pipes.get(node_id, 0) + 2
        for is_stderr, (read_end, _) in enumerate(pipes):
            os.set_blocking(read_end, False)
            self._new.append((read_end, _Stream(node_id, bool(is_stderr))))
        os.write(self._wake_write, b"+")
        return pipes[0][1], pipes[1][1]

    def last_lines(self, node_id: str, patience_s: float = 0.5, most: int = _USUAL_LINES) -> list[str]:
        """Return a node's last lines of both streams; wait up to `patience_s` for a dying node to close its pipes."""
        with self._changed:
            self._changed.wait_for(lambda: self._open_pipes.get(node_id, 0) == 0, patience_s)
            return list(self._last.get(node_id, ()))[-most:]

    def close(self, patience_s: float = 1.0) -> None:
        """Write what is still in the pipes, then stop. Pipes that other processes keep open are abandoned.

        If the output is blocked (by a pager or a stopped terminal), this returns after 2 s. The thread then writes the
        rest once the output takes it, and the interpreter waits for that before it exits.
        """
        with self._changed:
            self._changed.wait_for(lambda: not any(self._open_pipes.values()), patience_s)
        self._is_closing = True
        os.write(self._wake_write, b".")
        if self._thread.ident is None:
            self._free()
            return
        join_or_leave(self._thread, _WRITING_PATIENCE_S)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._pass_on(None)
            for _ in range(_LAST_LOOKS):
                self._pass_on(0.0)
        finally:
            self._free()

    def _pass_on(self, timeout_s: float | None) -> None:
        due = min(self._waiting.values(), default=None)
        if timeout_s is None and due is not None:
            timeout_s = max(0.0, due - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._wake_read:
                os.read(self._wake_read, 4096)
            else:
                self._read(key.fd, key.data)
        while self._new:
            fd, stream = self._new.popleft()
            self._selector.register(fd, selectors.EVENT_READ, stream)
        now = time.monotonic()
        for stream in [stream for stream, due in self._waiting.items() if due <= now]:
            lines, unfinished = stream.lines.look(now)
            self._write(stream, lines)
            if unfinished is not None:
                self._output.show(stream.node_id, stream.is_stderr, unfinished)
            self._wait_for(stream)
        self._output.flush()

    def _free(self) -> None:
        for fd in [*(key.fd for key in self._selector.get_map().values()), *(fd for fd, _ in self._new)]:
            os.close(fd)
        self._selector.close()
        os.close(self._wake_write)
        self._output.close()

    def _read(self, fd: int, stream: _Stream) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._write(stream, stream.lines.feed(data, time.monotonic()))
            self._wait_for(stream)
        else:
            self._write(stream, stream.lines.close())
            self._waiting.pop(stream, None)
            self._selector.unregister(fd)
            os.close(fd)
            with self._changed:
                self._open_pipes[stream.node_id] -= 1
                self._changed.notify_all()

    def _write(self, stream: _Stream, lines: list[bytes]) -> None:
        if lines:
            self._last[stream.node_id].extend(line.decode(errors="replace") for line in lines[-MOST_LINES:])
            self._output.write(stream.node_id, stream.is_stderr, lines)

    def _wait_for(self, stream: _Stream) -> None:
        due = stream.lines.due
        if due is None:
            self._waiting.pop(stream, None)
        else:
            self._waiting[stream] = due


def _two_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return two pipes; open neither if only one of them can be opened."""
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for descriptor in first:
            os.close(descriptor)
        raise


def join_or_leave(writing: threading.Thread, patience_s: float) -> None:
    """Wait for a thread that writes the nodes' lines; after `patience_s` let it finish before the process exits."""
    writing.join(patience_s)
    if writing.is_alive():
        _unfinished.append(writing)
        _log.warning(
            "the output of this process is blocked (by a pager or a stopped terminal?): the nodes' last lines are "
            "neither printed nor in their log files until it is read"
        )


def _write_the_rest() -> None:
    for thread in _unfinished:
        thread.join()


_unfinished: list[threading.Thread] = []
# A callback, not a non-daemon thread: such a thread would be joined before the runs that are still live are stopped.
call_before_threads_are_joined(_write_the_rest)
