"""The option `--plan FILE`: build a target's program with the stages and replicas of a plan."""

import argparse
import sys
from collections.abc import Sequence

from lp_pipe.cli.errors import NotLaunched, UsageError
from lp_pipe.cli.targets import load_program
from lp_pipe.errors import PartitionError
from lp_pipe.program import Program


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add --plan and --plan-group."""
    parser.add_argument("--plan", metavar="FILE", help="a plan.toml that replaces the stages of the program's pipeline")
    parser.add_argument("--plan-group", metavar="LABEL", help="the pipeline that the plan is for, if there are several")


def load_planned(arguments: argparse.Namespace, program_flags: Sequence[str]) -> Program:
    """Return the target's program, built with the plan if one is given.

    Raises:
        UsageError: there is no such target or plan, or the plan does not fit this program.
        NotLaunched: the target's own code raised.
    """
    if arguments.plan is None:
        if arguments.plan_group is not None:
            raise UsageError(f"--plan-group={arguments.plan_group} needs --plan=FILE")
        return load_program(arguments.target, program_flags)
    from lp_pipe.pipeline.partitioning.plan import Plan  # numpy is slow to load
    from lp_pipe.pipeline.planned import plan_in_place

    try:
        with plan_in_place(Plan.load(arguments.plan), arguments.plan, arguments.plan_group) as place:
            try:
                program = load_program(arguments.target, program_flags)
            except NotLaunched as error:
                raise place.refusal or error from error
            place.check(program)
            for difference in place.unused(program):
                print(f"lp_pipe: {difference}", file=sys.stderr)
            return program
    except PartitionError as error:
        raise UsageError(str(error)) from error
