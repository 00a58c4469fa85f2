"""`lp_pipe stop`: stop a running program in order, from another terminal."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence

from lp_pipe.cli.find_run import add_run_argument, asking, find_run_to_stop


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "stop",
        help="stop a running program in order",
        description=(
            "Stop a running program, as Ctrl+C in its own terminal does, and wait until all its processes have ended. "
            "Without RUN, stop the only run that was launched in this folder or in this terminal."
        ),
        usage="lp_pipe stop [RUN]",
        allow_abbrev=False,
    )
    add_run_argument(parser, without="the one launched in this folder or terminal")
    parser.set_defaults(run=run_command)


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
