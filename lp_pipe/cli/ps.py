"""`lp_pipe ps`: list the running programs of this user."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lp_pipe.cli.find_run import live_runs, run_table
from lp_pipe.launch.run_records import dead_entries


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "ps",
        help="list your running programs on this host",
        description="List your running programs on this host. Unit tests in thread mode are not listed.",
        usage="lp_pipe ps [--json]",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print the table; if killed runs have leftovers, print a hint on stderr."""
    live = live_runs()
    if arguments.json:
        for record in live:
            print(json.dumps({"name": record.name, **asdict(record)}))
    elif live:
        print(run_table(live))
    if dead := dead_entries():
        print(f"leftovers of killed runs: {len(dead)}; remove them with: lp_pipe clean", file=sys.stderr)
    return 0
