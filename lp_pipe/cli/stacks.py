"""`lp_pipe stacks`: print the current stack of every thread of every node."""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lp_pipe.cli.errors import counted
from lp_pipe.cli.find_run import add_run_argument, asking, find_live_run
from lp_pipe.telemetry.tracebacks import fold_traceback, owners_of_frames

_HEADER = "Traceback (most recent call last):"
_INTERPRETER = '  File "<string>", line 1'  # the outermost frame of a node process
# "host h1", "node trainer/0", "thread MainThread:", or, where nodes are threads, "node trainer/0, thread trainer/0:".
_TITLE = re.compile(r"(?:host (?P<host>.*)|(?:node (?P<node>\S+))?(?:, )?(?:thread (?P<thread>.*):)?)$")


HELP = "print where every node's own code is"
DESCRIPTION = (
    "Print where the threads of every node are, to find out why a program hangs: only threads that run "
    "your code, without the frames that lead to it. With --all print every frame of every thread."
)
USAGE = "lp_pipe stacks [RUN] [--all]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run_argument(parser)
    parser.add_argument("--all", action="store_true", help="print every frame of every thread")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Ask the run and print its answer.

    Raises:
        UsageError, NotAnswered: there is no such run, or it does not answer.
    """
    with asking(find_live_run(arguments.target), may_take_long=True) as control:
        text = control.stacks()
    if not arguments.all:
        text = "\n".join(own_frames_first(text))
    print(text or "no node is up yet, or none any more")
    return 0


def own_frames_first(text: str) -> Iterator[str]:
    """Yield, for each node in the text of `Run.stacks`, the stacks with user frames and the number of other stacks."""
    for title, stacks in _stacks_by_node(text).items():
        yield title
        others = 0
        for thread, stack in stacks:
            frames = [line for line in stack if line.startswith("  ")]
            if frames and frames[0].startswith(_INTERPRETER):
                del frames[0]
            if not frames:
                yield from (f"  {line}" for line in stack if line)  # the reason why the node has not answered
            elif None in owners_of_frames(frames):
                yield f"  thread {thread}:"
                yield from (f"    {line}" for line in fold_traceback("\n".join([_HEADER, *frames]), Path.cwd()))
            else:
                others += 1
        if others:
            yield f"  … {counted(others, 'thread')} without your code: --all shows them"


def _stacks_by_node(text: str) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the threads of each node, with the lines of their stacks."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    host, stacks, stack = "", list[tuple[str, list[str]]](), list[str]()
    for line in text.splitlines():
        title = _TITLE.match(line) if line and not line.startswith(" ") else None
        if title is None:
            stack.append(line)
            continue
        stack = []
        if title["host"] is not None:
            host = f" on {title['host']}"
            continue
        if title["node"] is not None:
            stacks = found.setdefault(f"node {title['node']}{host}", [])
        stacks.append((title["thread"] or "", stack))
    return found
