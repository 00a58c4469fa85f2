"""`lp_pipe stop`: stop a running program in order, from another terminal."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence

from lp_pipe.cli.find_run import add_run_argument, asking, find_run_to_stop

HELP = "stop a running program in order"
DESCRIPTION = (
    "Stop a running program, as Ctrl+C in its own terminal does, and wait until all its processes have ended. "
    "Without RUN, stop the only run that was launched in this folder or in this terminal."
)
USAGE = "lp_pipe stop [RUN]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run_argument(parser, without="the one launched in this folder or terminal")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Stop the run and print how its nodes ended.

    Raises:
        UsageError, NotAnswered: there is no such run, or it does not answer.
    """
    record = find_run_to_stop(arguments.target)
    began = time.monotonic()
    with asking(record, may_take_long=True) as control:
        status = control.stop()
    states = Counter(row["state"] for rows in status.values() for row in rows)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"run {record.name} ended in {time.monotonic() - began:.1f} s; nodes: {counted}")
    return 0
