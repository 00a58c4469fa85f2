"""`lp_pipe graph`: show a program's graph without starting anything."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lp_pipe.cli.errors import NotLaunched
from lp_pipe.cli.output_files import output_path, write_file
from lp_pipe.cli.plan_options import add_plan_options, load_planned
from lp_pipe.graph import GraphView, to_dot, to_svg, to_text

WRITERS: dict[str, Callable[[GraphView], str]] = {".svg": to_svg, ".dot": to_dot, ".json": GraphView.to_json}
EPILOG = """\
examples:
  lp_pipe graph examples/char_gpt.py
  lp_pipe graph examples/char_gpt.py -o graph.svg -o graph.dot -- --stages=3
  lp_pipe graph my_package.train:make_program -o graph.json
  lp_pipe graph examples/char_gpt.py --plan=plan.toml -o planned.svg       with the plan's stages and predicted times
  lp_pipe launch examples/char_gpt.py --mode=multi_host --dry-run          also shows the channels between hosts
"""


HELP = "show a program's graph as text, SVG, DOT or JSON"
DESCRIPTION = "Show a program's nodes, and which of them hold handles of which others. Nothing is started."
USAGE = "lp_pipe graph TARGET [-o FILE]… [--mode MODE] [-- program flags]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("target", metavar="TARGET", help="path/file.py[:name] or package.module[:name]")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        type=partial(output_path, suffixes=WRITERS),
        metavar="FILE",
        help=f"ends in {', '.join(WRITERS)}; may be given several times (default: text on stdout)",
    )
    parser.add_argument(
        "--mode",
        choices=("process", "thread"),
        default="process",
        help='the mode for which "auto" channels are resolved (default: process)',
    )
    add_plan_options(parser)


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print or write the graph.

    Raises:
        UsageError, NotLaunched: the target is no program, or its graph is invalid.
    """
    program = load_planned(arguments, program_flags)
    try:
        view = GraphView.of(program, arguments.mode)
    except ValueError as error:
        raise NotLaunched(f"{arguments.target}: {error}") from error
    outputs: list[Path] = arguments.output
    if not outputs:
        print(to_text(view), end="")
    for output in outputs:
        write_file(output, WRITERS[output.suffix](view))
        print(f"wrote {output}")
    return 0
