"""`lp_pipe doctor`: whether programs can run on this machine, and what would help."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from lp_pipe.cli.checks import Check, run_checks
from lp_pipe.cli.errors import DONE, UNHEALTHY


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "doctor",
        help="check whether programs can run on this machine",
        description="Look at what programs need of this machine, and say what would help. Nothing is changed.",
        epilog="Exit status: 0 programs can run, 1 something fails.",
        usage="lp_pipe doctor [--json]",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print a line for each check, and below it the command that fixes what is wrong."""
    checks = run_checks()
    for check in checks:
        print(json.dumps(asdict(check)) if arguments.json else _described(check))
    return UNHEALTHY if any(check.level == "fail" for check in checks) else DONE


def _described(check: Check) -> str:
    line = f"{check.level:<4}  {check.name:<13}  {check.text}"
    return f"{line}\n{'':21}fix: {check.fix}" if check.fix else line
