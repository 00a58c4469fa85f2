"""The command's own standard streams, which may be closed from the start, full, or without a reader."""

import contextlib
import io
import os
import sys
from typing import TextIO

from lp_pipe.launch.processes import standard_streams


def prepare() -> None:
    """Open closed streams, for which sys has None, and let stdout escape characters that its encoding lacks."""
    standard_streams.open_closed()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for stderr


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a message, by default to stderr; ignore that it cannot be written."""
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stderr, flush=True)


def drop_unwritten() -> None:
    """Discard output that cannot be written: Python would try again at its end, and exit with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
