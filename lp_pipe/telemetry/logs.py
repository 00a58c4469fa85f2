"""The output of nodes: prefixed, in whole lines, to the launcher's own streams and to a file per node."""

import contextlib
import os
import selectors
import sys
import threading
from collections import deque
from io import FileIO
from pathlib import Path

_KEPT_LINES = 20
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20


class _Stream:
    """One pipe from one node."""

    def __init__(self, node_id: str, is_stderr: bool) -> None:
        self.node_id = node_id
        self.is_stderr = is_stderr
        self.partial = b""


class LogPump:
    """Reads the nodes' pipes in one thread. A launcher that does not read its output makes the nodes wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._new: deque[tuple[int, _Stream]] = deque()
        self._files: dict[str, FileIO] = {}
        self._last: dict[str, deque[str]] = {}
        self._open_pipes: dict[str, int] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="node logs", daemon=True)

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def path(self, node_id: str) -> Path:
        """The file that holds all the node's output."""
        return self._folder / (node_id.replace("/", "-") + ".log")

    def add_node(self, node_id: str) -> tuple[int, int]:
        """Descriptors for the node's stdout and stderr; the caller closes them once the node has its own."""
        with self._changed:
            self._last.setdefault(node_id, deque(maxlen=_KEPT_LINES))
            self._open_pipes[node_id] = self._open_pipes.get(node_id, 0) + 2
        ends = []
        for is_stderr in (False, True):
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            self._new.append((read_end, _Stream(node_id, is_stderr)))
            ends.append(write_end)
        os.write(self._wake_write, b"+")
        return ends[0], ends[1]

    def last_lines(self, node_id: str, patience_s: float = 0.5) -> list[str]:
        """The node's last lines, both streams; waits a moment for the output of a node that has just died."""
        with self._changed:
            self._changed.wait_for(lambda: self._open_pipes.get(node_id, 0) == 0, patience_s)
            return list(self._last.get(node_id, ()))

    def close(self, patience_s: float = 1.0) -> None:
        """Write what is still in the pipes, then stop; pipes that strangers keep open are given up."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._open_pipes.values()), patience_s)
        self._is_closing = True
        os.write(self._wake_write, b".")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake_write)
        for file in self._files.values():
            file.close()

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select():
                if key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    self._read(key.fd, key.data)
            while self._new:
                fd, stream = self._new.popleft()
                self._selector.register(fd, selectors.EVENT_READ, stream)
            for target in (sys.stdout, sys.stderr):
                with contextlib.suppress(ValueError, OSError):  # the launcher has closed it
                    target.flush()

    def _read(self, fd: int, stream: _Stream) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, stream.partial = (stream.partial + data).split(b"\n")
        if stream.partial and (not data or len(stream.partial) > _MAX_LINE_BYTES):
            lines, stream.partial = [*lines, stream.partial], b""
        if lines:
            self._write(stream, lines)
        if not data:
            self._selector.unregister(fd)
            os.close(fd)
            with self._changed:
                self._open_pipes[stream.node_id] -= 1
                self._changed.notify_all()

    def _write(self, stream: _Stream, lines: list[bytes]) -> None:
        with contextlib.suppress(OSError):  # disk full, folder removed: a pump that ended would block every node
            file = self._files.get(stream.node_id)
            if file is None:
                file = self._files[stream.node_id] = self.path(stream.node_id).open("ab", buffering=0)
            file.write(b"".join(line + b"\n" for line in lines))
        texts = [line.decode(errors="replace") for line in lines]
        self._last[stream.node_id].extend(texts)
        target = sys.stderr if stream.is_stderr else sys.stdout
        with contextlib.suppress(ValueError, OSError):  # the launcher has closed it; the file has everything
            target.write("".join(f"[{stream.node_id}] {text}\n" for text in texts))
