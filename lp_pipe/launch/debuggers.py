"""Connect the user's terminal to debuggers of nodes. The node's side is in processes/node_stdin.py."""

import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

from lp_pipe.launch.processes.node_stdin import READY, RESUMED, uid_of_peer, waiting_nodes

GOES_ON = "the node goes on"
_NEXT_PROMPT_S = 0.5  # a debugger that steps has it within milliseconds


class LocalDebuggers:
    """Connects the launcher's own terminal to debuggers of its nodes, one at a time.

    lend: returns a context manager for exclusive use of the terminal, which yields the stream to write to; None
        if there is no terminal.
    """

    def __init__(self, run_dir: Path, lend: Callable[[], AbstractContextManager[TextIO] | None]) -> None:
        self._run_dir = run_dir
        self._lend = lend
        self._left: set[str] = set()  # nodes with debuggers that the user has left for `lp_pipe attach`

    def look(self) -> None:
        """Connect the terminal to a node that waits in a debugger, until the node's code goes on."""
        for node, facts in waiting_nodes(self._run_dir).items():
            terminal = self._lend() if node not in self._left and _is_in_foreground() else None
            if terminal is None or facts["host"] != socket.gethostname():
                continue
            try:
                session = DebuggerSession(self._run_dir, node)
            except OSError:  # the node has just gone on
                continue
            with contextlib.closing(session.connection), terminal as stdout:
                stdout.write(f"node {node} waits in a debugger at {facts['place']} (Ctrl+D leaves it waiting)\n")
                end = session.talk(sys.stdin, stdout, stay=False)
                stdout.write(f"{end}\n")
            if end != GOES_ON:
                self._left.add(node)
            return


def _is_in_foreground() -> bool:
    """Return whether this process may read the terminal. The system stops a background process that does."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # closed
        return False


class DebuggerSession:
    """A connection to the debugger of one node. The caller closes `connection`.

    Raises:
        OSError: the debugger no longer listens, or belongs to another user.
    """

    def __init__(self, run_dir: Path, node: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        try:
            self.connection.connect(waiting_nodes(run_dir).get(node, {}).get("socket", ""))
            if uid_of_peer(self.connection) not in (None, os.getuid()):
                raise PermissionError(None, "the debugger belongs to another user")
        except OSError:
            self.connection.close()
            raise

    def talk(self, stdin: TextIO, stdout: TextIO, *, stay: bool) -> str:
        """Pass text to `stdout` and lines from `stdin` to the debugger; returns why that ended.

        stay: go on after the node's code has resumed, and wait for its next debugger prompt.
        """
        is_ready, is_at_end, typed = False, False, b""
        timeout_s = None
        while True:
            if is_ready and b"\n" in typed:
                line, _, typed = typed.partition(b"\n")
                is_ready = False
                with contextlib.suppress(OSError):  # the process has ended, which `_receive` shows next
                    self.connection.sendall(line + b"\n")
            if is_ready and is_at_end:
                return "detached; the node still waits in its debugger"
            sources: list[socket.socket | TextIO] = [self.connection]
            sources += [] if is_at_end else [stdin]
            ready, _, _ = select.select(sources, [], [], timeout_s)
            timeout_s = None
            if not ready:
                return GOES_ON
            if self.connection in ready:
                data = self._receive()
                if not data:
                    return "the node's process has ended"
                is_ready = data.endswith(READY)
                if data.endswith(RESUMED) and not stay:
                    timeout_s = _NEXT_PROMPT_S
                stdout.write(data.replace(READY, b"").replace(RESUMED, b"").decode(errors="replace"))
                stdout.flush()
            else:
                new = os.read(stdin.fileno(), 4096)  # unbuffered, so that select sees what is left
                is_at_end = not new
                typed += new

    def _receive(self) -> bytes:
        try:
            return self.connection.recv(1 << 16)
        except OSError:
            return b""
