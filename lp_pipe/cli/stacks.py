"""`lp_pipe stacks`: where every thread of every node is right now."""

import argparse
from collections.abc import Sequence

from lp_pipe.cli.find_run import add_run_argument, asking, find_live_run


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "stacks",
        help="print the Python stacks of every node",
        description="Where every thread of every node is right now: why a program hangs.",
        usage="lp_pipe stacks [RUN]",
        allow_abbrev=False,
    )
    add_run_argument(parser)
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Ask and print.

    Raises:
        UsageError, NotAnswered: there is no such run, or it does not answer.
    """
    with asking(find_live_run(arguments.target), may_take_long=True) as control:
        print(control.stacks() or "no node is up yet, or none any more")
    return 0
