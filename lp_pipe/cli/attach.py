"""`lp_pipe attach`: talk to the debugger in which a node waits."""

import argparse
import contextlib
import os
import select
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from lp_pipe.cli.display import Display
from lp_pipe.cli.errors import DONE, NotAnswered, UsageError, nearest
from lp_pipe.cli.find_run import find_run
from lp_pipe.launch.processes.node_stdin import FOLDER, READY, RESUMED, uid_of_peer, waiting_nodes
from lp_pipe.launch.report import shown

GOES_ON = "the node goes on"
_NEXT_PROMPT_S = 0.5  # a debugger that steps has it within milliseconds
_DESCRIPTION = """\
Talk to the debugger in which a node waits: breakpoint(), pdb.set_trace() or pdb.post_mortem() in a node that is a
process. The commands are pdb's. Ctrl+D leaves the node at the prompt; Ctrl+C does so at any time.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "attach",
        help="talk to the debugger in which a node waits",
        description=_DESCRIPTION,
        usage="lp_pipe attach [RUN] [NODE]",
        allow_abbrev=False,
    )
    parser.add_argument("words", metavar="[RUN] [NODE]", nargs="*", help="may be left out where there is only one")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Attach until the node's code has ended, or the user leaves.

    Raises:
        UsageError: no such run, or no such node of it waits in a debugger here.
        NotAnswered: it has just gone on.
    """
    run_dir, node = _run_and_node(arguments.words)
    try:
        session = Session(run_dir, node)
    except OSError as error:
        raise NotAnswered(f"node {node} does not wait in a debugger any more ({error.strerror})") from error
    with contextlib.closing(session):
        try:
            end = session.talk(sys.stdin, sys.stdout, stay=True)
        except KeyboardInterrupt:
            end = "detached"
    print(f"\nlp_pipe attach: {end}")
    return DONE


def _run_and_node(words: Sequence[str]) -> tuple[Path, str]:
    if len(words) > 2:
        raise UsageError("attach takes a run and a node: lp_pipe attach RUN NODE")
    if len(words) == 2:
        return _checked(_folder(words[0]), words[1])
    if not words:
        return _checked(_folder(None), "")
    try:
        return _checked(_folder(words[0]), "")
    except UsageError:
        with contextlib.suppress(UsageError):  # it is no run, so maybe a node of the only one
            return _checked(_folder(None), words[0])
        raise


def _folder(run: str | None) -> Path:
    if run is not None and (Path(run) / FOLDER).is_dir():  # on another host than the launcher's
        return Path(run)
    return Path(find_run(run).run_dir)


def _checked(run_dir: Path, node: str) -> tuple[Path, str]:
    """The node that is meant: of several that wait, the one that is named.

    Raises:
        UsageError: it does not wait in a debugger, or on another host.
    """
    waiting = waiting_nodes(run_dir)
    places = "; ".join(f"{name} at {facts['place']}" for name, facts in waiting.items())
    if not node and len(waiting) == 1:
        node = next(iter(waiting))
    if not node:
        what = f"say which node: {places}" if waiting else "no node waits in a debugger"
        raise UsageError(f"run {run_dir.name}: {what}")
    if node not in waiting:
        raise UsageError(
            f"node {node} of run {run_dir.name} does not wait in a debugger{nearest(node, waiting)}"
            + (f" (waiting: {places})" if waiting else "")
        )
    host = waiting[node]["host"]
    if host != socket.gethostname():
        command = f"lp_pipe attach {shlex.quote(str(shown(str(run_dir))))} {node}"
        raise UsageError(f"node {node} is on host {host}: run `{command}` there")
    return run_dir, node


class DebuggersHere:
    """Lends the launcher's own terminal to the debuggers of its nodes, one at a time."""

    def __init__(self, run_dir: Path, display: Display) -> None:
        self._run_dir = run_dir
        self._display = display
        self._left: set[str] = set()  # nodes whose debugger the user has left, or that others talk to

    def look(self) -> None:
        """Where a node waits in a debugger, talk to that until its code goes on."""
        for node, facts in waiting_nodes(self._run_dir).items():
            terminal = self._display.suspended() if node not in self._left and _is_in_foreground() else None
            if terminal is None or facts["host"] != socket.gethostname():
                continue
            try:
                session = Session(self._run_dir, node)
            except OSError:  # it has just gone on
                continue
            with contextlib.closing(session), terminal as stdout:
                stdout.write(f"node {node} waits in a debugger at {facts['place']} (Ctrl+D leaves it waiting)\n")
                end = session.talk(sys.stdin, stdout, stay=False)
                stdout.write(f"{end}\n")
            if end != GOES_ON:
                self._left.add(node)
            return


def _is_in_foreground() -> bool:
    """Whether this process may read the terminal, which would stop one in the background."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # closed
        return False


class Session:
    """A connection to the debugger of one node.

    Raises:
        OSError: the debugger does not listen any more, or is another user's.
    """

    def __init__(self, run_dir: Path, node: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.connect(waiting_nodes(run_dir).get(node, {}).get("socket", ""))
            if uid_of_peer(self._connection) not in (None, os.getuid()):
                raise PermissionError(None, "it is another user's")
        except OSError:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def talk(self, stdin: TextIO, stdout: TextIO, *, stay: bool) -> str:
        """Pass text and lines on; returns why it ended. stay: also while the node's code goes on."""
        is_ready, is_at_end, typed = False, False, b""
        timeout_s = None
        while True:
            if is_ready and b"\n" in typed:
                line, _, typed = typed.partition(b"\n")
                is_ready = False
                with contextlib.suppress(OSError):  # the end of the process comes next
                    self._connection.sendall(line + b"\n")
            if is_ready and is_at_end:
                return "detached; the node still waits in its debugger"
            sources: list[socket.socket | TextIO] = [self._connection]
            sources += [] if is_at_end else [stdin]
            ready, _, _ = select.select(sources, [], [], timeout_s)
            timeout_s = None
            if not ready:
                return GOES_ON
            if self._connection in ready:
                data = self._receive()
                if not data:
                    return "the node's process has ended"
                is_ready = data.endswith(READY)
                if data.endswith(RESUMED) and not stay:
                    timeout_s = _NEXT_PROMPT_S
                stdout.write(data.replace(READY, b"").replace(RESUMED, b"").decode(errors="replace"))
                stdout.flush()
            else:
                new = os.read(stdin.fileno(), 4096)  # and no more than select knows of
                is_at_end = not new
                typed += new

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(1 << 16)
        except OSError:
            return b""
