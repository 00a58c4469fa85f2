"""The command's own standard streams: closed from the start, full, or read by nobody any more."""

import contextlib
import io
import os
import sys
from typing import TextIO

from lp_pipe.launch.processes import standard_streams


def prepare() -> None:
    """Python has None for those that are closed; and a terminal in Latin-1, say, has no arrow."""
    standard_streams.open_closed()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for stderr


def say(text: str, stream: TextIO | None = None) -> None:
    """Print (to stderr) what would be good to know, but must not stand in the way of what is to be done next."""
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stderr, flush=True)


def drop_unwritten() -> None:
    """What was printed in vain goes nowhere: at its end Python would try again, and exit with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
