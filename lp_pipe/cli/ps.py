"""`lp_pipe ps`: list the running programs of this user."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lp_pipe.cli.find_run import live_runs, run_table
from lp_pipe.launch.run_records import dead_entries

HELP = "list your running programs on this host"
DESCRIPTION = "List your running programs on this host. Unit tests in thread mode are not listed."
USAGE = "lp_pipe ps [--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


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
