"""The ends of processes, reported one after the other, and all of them soon."""

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from lp_pipe.telemetry.signal_names import signal_name

# How long to wait for the last words of a process that has ended. Counted from the news, not from their turn: of 50
# processes that die at once, with pipes that grandchildren keep open, all are reported after this time.
LAST_WORDS_PATIENCE_S = 0.5

KILLED = "the process was killed by"  # how the words for a signal begin

_Report = Callable[[float], None]


class ExitQueue:
    """Runs the reports in a thread of its own, in the order of the news; each gets its deadline (time.monotonic)."""

    def __init__(self) -> None:
        self._news: SimpleQueue[tuple[_Report, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exits of nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, report: _Report) -> None:
        """A process has ended just now."""
        self._news.put((report, time.monotonic() + LAST_WORDS_PATIENCE_S))

    def close(self) -> None:
        """Returns once what was put has been reported."""
        self._news.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (news := self._news.get()) is not None:
            report, deadline = news
            report(deadline)


def how_it_died(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        name = signal_name(os.WTERMSIG(status))
        hint = " (kill -9, or the kernel when memory ran out: see dmesg)" if name == "SIGKILL" else ""
        return f"{KILLED} {name}{hint}"
    code = os.waitstatus_to_exitcode(status)
    return f"the process ended with exit code {code} without reporting why: os._exit({code}), or exit({code}) in C code"
