"""The standard input of a node's process: an error for `input()`, a connection to a terminal for debuggers.

A node's process has no terminal. When pdb (and so `breakpoint()`) asks sys.stdin for a line, the debugger is connected
to `lp_pipe attach`, or to the launcher's terminal, over a unix socket in the run's private folder. Meanwhile the node's
code waits.

    pdb ◄──► Terminal ══ unix socket ══ attach_terminal.py ◄──► the user's terminal
"""

import functools
import io
import json
import os
import select
import shlex
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lp_pipe.context import NodeContext
from lp_pipe.telemetry import waits
from lp_pipe.telemetry.file_writing import write_atomically
from lp_pipe.telemetry.run_folder import RunFolder

READY, RESUMED = b"\0", b"\1"  # sent after the text: the debugger waits for a line; the node's code goes on
_LOOK_FOR_STOP_S = 0.2
_MAX_BACKLOG_BYTES = 1 << 16
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class NodeStdin(io.TextIOBase):
    """The replacement of sys.stdin.

    socket_dir: the run's private folder. host: this host's name in a run on several hosts, else "".
    """

    def __init__(self, node: NodeContext, socket_dir: str, host: str = "") -> None:
        self._node = node
        self._terminal = Terminal(node, socket_dir, host)

        self.buffer = io.BytesIO()

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0  # /dev/null

    def read(self, size: int | None = -1) -> str:
        return ""

    def __next__(self) -> str:  # type: ignore[override]
        raise StopIteration

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Return the next line for the debugger that asks.

        Raises:
            EOFError: the node's own code asks, for example with input().
        """
        debugger = _debugger_in(sys._getframe(1))
        if debugger is None:
            raise EOFError(
                f"node {self._node.name} cannot read from stdin, because it has no terminal: pass the value as an "
                "argument or a flag (to debug: breakpoint(), lp_pipe attach)"
            )
        return self._terminal.take(debugger)


def _debugger_in(frame: FrameType | None) -> Any | None:
    """Return the debugger (a pdb.Pdb) that asks for a line in its command loop; None if other code asks."""
    pdb = sys.modules.get("pdb")
    while pdb is not None and frame is not None:
        found = frame.f_locals.get("self") if frame.f_code.co_name == "cmdloop" else None
        if isinstance(found, pdb.Pdb):
            return found
        frame = frame.f_back
    return None


def _place_of(debugger: Any | None) -> str:
    return "" if debugger is None else waits.place_of(debugger.curframe)


class Terminal(io.TextIOBase):
    """The terminal of all debuggers in this process. Debuggers of several threads take turns, line by line."""

    def __init__(self, node: NodeContext, socket_dir: str, host: str) -> None:
        self._node = node
        self._path = f"{socket_dir}/debugger-{os.getpid()}"
        self._host = host
        self._file = RunFolder(node.run_dir).debuggers / f"{socket.gethostname()}-{os.getpid()}.json"
        self._lock = threading.RLock()
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._heard = b""
        self._backlog = b""
        self._is_announced = False

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def take(self, debugger: Any) -> str:
        """Redirect the debugger to this terminal, and return the first line for it."""
        debugger.stdin = debugger.stdout = self
        debugger.use_rawinput = False
        debugger.postcmd = functools.partial(self._after_command, type(debugger).postcmd.__get__(debugger))
        with self._lock:
            print(flush=True)  # ends the line of the prompt in the node's log
            self._backlog = b""
            if debugger.curframe is not None:
                debugger.print_stack_entry(debugger.stack[debugger.curindex])
            self.write(debugger.prompt)
            return self.readline()

    def write(self, text: str) -> int:
        data = text.encode(errors="replace")
        with self._lock:
            self._backlog = (self._backlog + data)[-_MAX_BACKLOG_BYTES:]
            self._send(data)
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Return the next line from the attached terminal; "continue" once the program stops, so that the node ends."""
        place = _place_of(_debugger_in(sys._getframe(1)))
        with self._lock, waits.waiting(waits.DEBUGGER, waits.Target(), place, node=self._node):
            self._send(READY)
            while b"\n" not in self._heard:
                if self._node.is_stopping:
                    self.write("\n-> the program is stopping, so this node goes on\n")
                    return "continue\n"
                if self._connection is None:
                    self._announce(place)
                    self._accept()
                else:
                    self._receive(self._connection)
            line, _, self._heard = self._heard.partition(b"\n")
            self._backlog = b""
            return line.decode(errors="replace") + "\n"

    def _after_command(self, postcmd: Callable[[bool, str], bool], stop: bool, line: str) -> bool:
        is_leaving = postcmd(stop, line)
        if is_leaving:
            with self._lock:
                self._send(RESUMED)
                self._is_announced = False
                with suppress(OSError):
                    self._file.unlink()
        return is_leaving

    def _announce(self, place: str) -> None:
        """Write to the node's log where it waits, and write a file by which `lp_pipe attach` finds the socket."""
        if self._is_announced:
            return
        self._is_announced = True
        self._listen()
        facts = {"node": self._node.name, "place": place, "socket": self._path, "host": socket.gethostname()}
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            write_atomically(self._file, json.dumps(facts))
        run = shlex.quote(str(self._node.run_dir) if self._host else self._node.run_dir.name)
        name = shlex.quote(self._node.name)
        where = f"   (on host {self._host})" if self._host else ""
        text = f"node {self._node.name} waits in a debugger at {place}: lp_pipe attach {run} {name}{where}"
        print(text, file=sys.__stderr__, flush=True)

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            self._listener.bind(self._path)
            os.chmod(self._path, 0o600)
            self._listener.listen()

    def _accept(self) -> None:
        assert self._listener is not None
        if not _is_ready(self._listener):
            return
        connection, _ = self._listener.accept()
        if uid_of_peer(connection) not in (None, os.getuid()):
            connection.close()
            return
        self._connection = connection
        self._send(self._backlog + READY)

    def _receive(self, connection: socket.socket) -> None:
        if not _is_ready(connection):  # an end is read first, because the user may attach again right after it
            if self._listener is not None and _is_ready(self._listener, 0.0):
                second, _ = self._listener.accept()
                with suppress(OSError):
                    second.sendall(b"another terminal is attached to this debugger\n")
                second.close()
            return
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        self._heard += data
        if not data:
            self._detach()

    def _send(self, data: bytes) -> None:
        if self._connection is not None:
            try:
                self._connection.sendall(data)
            except OSError:
                self._detach()

    def _detach(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._heard, self._is_announced = None, b"", False


def uid_of_peer(connection: socket.socket) -> int | None:
    """Return the user id of the process at the other end of a unix socket; None if the system cannot tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = _PEER_CREDENTIALS.size
    _, uid, _ = _PEER_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def waiting_nodes(run_dir: Path) -> dict[str, dict[str, str]]:
    """Return the nodes of a run that wait in a debugger, by name, with place, socket and host of the debugger."""
    found = {}
    for path in sorted(RunFolder(run_dir).debuggers.glob("*.json")):
        with suppress(OSError, ValueError, KeyError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts["host"] != socket.gethostname() or os.path.exists(
                facts["socket"]
            ):  # otherwise its process has ended
                found[str(facts["node"])] = {name: str(facts[name]) for name in ("place", "socket", "host")}
    return found


def _is_ready(source: socket.socket, within_s: float = _LOOK_FOR_STOP_S) -> bool:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
