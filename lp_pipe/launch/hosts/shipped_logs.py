"""Lines of nodes on their way from an agent to the launcher: never more than a bounded number of bytes.

    pipes ─► LogPump ─► ShippedLogs ══════════► ReceivedLogs ─► files, streams
                             ▲                       │
                             └──── LinesWritten ─────┘    credit comes back once they are written

So a launcher that writes slowly, or not at all, makes the nodes that print wait, and nothing else: what supervises
them has the link to itself between two pieces.
"""

import threading
from collections import deque
from queue import SimpleQueue
from typing import NamedTuple

from lp_pipe.launch.hosts.agent_messages import LinesWritten, NodeLines, NodeUnfinishedLine
from lp_pipe.launch.supervision.peer import Peer
from lp_pipe.telemetry.log_files import LogOutput
from lp_pipe.telemetry.log_pump import join_or_leave
from lp_pipe.telemetry.terminal_lines import Unfinished

_WINDOW_BYTES = 1 << 19
_KEPT_LINES = 20


class ShippedLogs:
    """The agent's end: a LogOutput for its pump."""

    def __init__(self, launcher: Peer) -> None:
        self._launcher = launcher
        self._on_their_way = 0
        self._has_room = threading.Condition()
        self._is_closed = False

    def write(self, node_id: str, is_stderr: bool, lines: list[bytes]) -> None:
        """Send lines. Wait while there is no credit, as do the nodes that print; send nothing after `close`."""
        size = _size(lines)
        with self._has_room:
            self._has_room.wait_for(lambda: self._is_closed or self._on_their_way < _WINDOW_BYTES)
            if self._is_closed:
                return
            self._on_their_way += size
        self._launcher.tell_if_open(NodeLines(node_id, is_stderr, b"\n".join(lines)))

    def show(self, node_id: str, is_stderr: bool, unfinished: Unfinished) -> None:
        """Send an unfinished line if there is credit; else it comes with its end, or in a later state."""
        with self._has_room:
            if self._is_closed or self._on_their_way >= _WINDOW_BYTES:
                return
            self._on_their_way += len(unfinished.text)
        self._launcher.tell_if_open(NodeUnfinishedLine(node_id, is_stderr, *unfinished))

    def written(self, size: int) -> None:
        """Take back the credit for bytes that the launcher has written."""
        with self._has_room:
            self._on_their_way -= size
            self._has_room.notify_all()

    def flush(self) -> None:
        """Do nothing: the launcher flushes."""

    def close(self) -> None:
        """Free the threads that wait for credit: the lines are not read any more."""
        with self._has_room:
            self._is_closed = True
            self._has_room.notify_all()


class _Piece(NamedTuple):
    """Lines, or what has no end yet."""

    agent: Peer
    node_id: str
    is_stderr: bool
    content: bytes | Unfinished


class ReceivedLogs:
    """The launcher's end, one for all agents: writes in a thread of its own."""

    def __init__(self, output: LogOutput) -> None:
        self._output = output
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._last: dict[str, deque[str]] = {}
        self._thread = threading.Thread(target=self._run, name="node logs", daemon=True)
        self._thread.start()

    def put(self, agent: Peer, node_id: str, is_stderr: bool, content: bytes | Unfinished) -> None:
        """Return at once; what may wait here is bounded by the agents' windows."""
        self._pieces.put(_Piece(agent, node_id, is_stderr, content))

    def last_lines(self, node_id: str) -> list[str]:
        return list(self._last.get(node_id, ()))

    def close(self, patience_s: float = 5.0) -> None:
        """Write what has come; give up after a while if the launcher's output is not read, as LogPump.close does."""
        self._pieces.put(None)
        join_or_leave(self._thread, patience_s)

    def _run(self) -> None:
        try:
            self._write_all()
        finally:
            self._output.close()

    def _write_all(self) -> None:
        while (piece := self._pieces.get()) is not None:
            size = self._write(piece)
            if self._pieces.empty():
                self._output.flush()
            piece.agent.tell_if_open(LinesWritten(size))
        self._output.flush()

    def _write(self, piece: _Piece) -> int:
        """Return for how many bytes the agent gets its credit back."""
        if isinstance(piece.content, Unfinished):
            self._output.show(piece.node_id, piece.is_stderr, piece.content)
            return len(piece.content.text)
        lines = piece.content.split(b"\n")
        kept = self._last.setdefault(piece.node_id, deque(maxlen=_KEPT_LINES))
        kept.extend(line.decode(errors="replace") for line in lines[-_KEPT_LINES:])
        self._output.write(piece.node_id, piece.is_stderr, lines)
        return _size(lines)


def _size(lines: list[bytes]) -> int:
    return sum(map(len, lines)) + len(lines)
