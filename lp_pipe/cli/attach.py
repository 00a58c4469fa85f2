"""`lp_pipe attach`: connect this terminal to the debugger in which a node waits."""

import argparse
import contextlib
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from lp_pipe.cli.errors import DONE, NotAnswered, UsageError, nearest
from lp_pipe.cli.find_run import find_run
from lp_pipe.launch.debuggers import DebuggerSession
from lp_pipe.launch.processes.node_stdin import waiting_nodes
from lp_pipe.launch.report import shown
from lp_pipe.telemetry.run_folder import RunFolder

DESCRIPTION = """\
Connect this terminal to the debugger in which a node waits: breakpoint(), pdb.set_trace() or pdb.post_mortem() in a
node that is a process. The commands are pdb's. Ctrl+D at the prompt, or Ctrl+C at any time, leaves the node waiting.
"""


HELP = "connect to the debugger in which a node waits"
USAGE = "lp_pipe attach [RUN] [NODE]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("words", metavar="[RUN] [NODE]", nargs="*", help="not needed if there is only one")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Attach until the node's code has ended, or the user leaves.

    Raises:
        UsageError: there is no such run, or no such node of it waits in a debugger on this host.
        NotAnswered: the node has just left the debugger.
    """
    run_dir, node = _run_and_node(arguments.words)
    try:
        session = DebuggerSession(run_dir, node)
    except OSError as error:
        raise NotAnswered(f"node {node} no longer waits in a debugger ({error.strerror})") from error
    with contextlib.closing(session.connection):
        try:
            end = session.talk(sys.stdin, sys.stdout, stay=True)
        except KeyboardInterrupt:
            end = "detached"
    print(f"\nlp_pipe attach: {end}")
    return DONE


def _run_and_node(words: Sequence[str]) -> tuple[Path, str]:
    if len(words) > 2:
        raise UsageError("attach takes at most a run and a node: lp_pipe attach RUN NODE")
    if len(words) == 2:
        return _checked(_folder(words[0]), words[1])
    if not words:
        return _checked(_folder(None), "")
    try:
        return _checked(_folder(words[0]), "")
    except UsageError:
        with contextlib.suppress(UsageError):  # the word is no run; it may be a node of the only run
            return _checked(_folder(None), words[0])
        raise


def _folder(run: str | None) -> Path:
    if run is not None and RunFolder(Path(run)).debuggers.is_dir():  # works on hosts without the launcher, too
        return Path(run)
    return Path(find_run(run).run_dir)


def _checked(run_dir: Path, node: str) -> tuple[Path, str]:
    """Return the run's folder and the waiting node that `node` means.

    node: a node, a group with only one waiting node, or "" for the only waiting node.

    Raises:
        UsageError: the node does not wait in a debugger, or does so on another host.
    """
    waiting = waiting_nodes(run_dir)
    places = "; ".join(f"{name} at {facts['place']}" for name, facts in waiting.items())
    meant = [name for name in waiting if not node or name.rpartition("/")[0] == node]
    if len(meant) == 1:
        node = meant[0]
    if not node:
        what = f"several nodes wait in a debugger, name one: {places}" if waiting else "no node waits in a debugger"
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
