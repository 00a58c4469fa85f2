"""`lp_pipe trace`: record what all nodes of a live run do for some steps, for ui.perfetto.dev."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lp_pipe.cli.errors import DONE, NotAnswered, UsageError, counted, whole_number
from lp_pipe.cli.find_run import add_run_argument, asking, find_live_run
from lp_pipe.errors import NotSupported

_FILE = Path("trace.json")
EPILOG = """\
examples:
  lp_pipe trace                              the next 5 steps of the only live run, into trace.json
  lp_pipe trace RUN -n 20 -o slow.json
  lp_pipe trace RUN --seconds=2              what happens in 2 seconds, also in a run that takes no steps
  lp_pipe launch train.py --trace            all of it, into RUN/trace.json

Open the file at https://ui.perfetto.dev, or in chrome://tracing. It has a process for each node, with a track for each
thread; arrows lead from each sent tensor to its receiver. "predicted" shows the same actions without delays.
"""

HELP = "record what all nodes do for some steps, for ui.perfetto.dev"
DESCRIPTION = (
    "Record every forward, backward, transfer, reduction, call and wait of all nodes of a live run until the next N "
    "steps of a pipeline or of replicas are complete."
)
USAGE = "lp_pipe trace [RUN] [-n N] [-o FILE]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run_argument(parser)
    parser.add_argument(
        "-n",
        type=whole_number("-n ", "steps", 5, least=1),
        default=5,
        metavar="N",
        help="the number of complete steps (default: 5)",
    )
    parser.add_argument("-o", "--output", type=Path, default=_FILE, metavar="FILE", help=f"default: {_FILE}")
    parser.add_argument(
        "--seconds", type=_seconds, default=60.0, metavar="S", help="end after S seconds in any case (default: 60)"
    )


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Trace the run, and say what is in the file.

    Raises:
        UsageError, NotAnswered: there is no such run, it does not answer, or it is traced already.
    """
    path: Path = arguments.output.absolute()
    with asking(find_live_run(arguments.target), may_take_long=True) as control:
        try:
            end = control.trace(str(path), arguments.n, arguments.seconds)
        except NotSupported as error:
            raise NotAnswered(str(error).partition("\n")[0]) from None
        except OSError as error:
            raise UsageError(f"-o {arguments.output}: cannot be written: {error.strerror or error}") from None
    lost = f"; {counted(end.num_left_out, 'span')} had no room" if end.num_left_out else ""
    print(f"wrote {arguments.output}: {counted(end.num_steps, 'complete step')} in {end.seconds:.1f} s{lost}")
    return DONE


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds={text}: give a number of seconds above 0, such as --seconds=10")
    return seconds
