"""A queue that reports the ends of processes in order and within a bounded time, and their exit statuses in words."""

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from lp_pipe.telemetry.names import signal_name

# How long to wait for the last output of a process that has ended. Counted from its end, not from its turn in the
# queue: if 50 processes die at once, and grandchildren keep their pipes open, all are reported after this time.
LAST_WORDS_PATIENCE_S = 0.5

KILLED = "the process was killed by"  # the beginning of the text for a signal

_Report = Callable[[float], None]


class ExitQueue:
    """Runs reports in a thread of its own, in order. Each report gets its deadline (time.monotonic)."""

    def __init__(self) -> None:
        self._news: SimpleQueue[tuple[_Report, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exits of nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, report: _Report) -> None:
        """Queue the report of a process that has just ended."""
        self._news.put((report, time.monotonic() + LAST_WORDS_PATIENCE_S))

    def close(self) -> None:
        """Wait until all queued reports are done, and end the thread."""
        self._news.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (news := self._news.get()) is not None:
            report, deadline = news
            report(deadline)


def how_it_died(status: int) -> str:
    """Return a wait status in words."""
    if os.WIFSIGNALED(status):
        name = signal_name(os.WTERMSIG(status))
        hint = " (kill -9, or the kernel when memory ran out: see dmesg)" if name == "SIGKILL" else ""
        return f"{KILLED} {name}{hint}"
    code = os.waitstatus_to_exitcode(status)
    return f"the process ended with exit code {code} and reported no error: os._exit({code}), or exit({code}) in C code"
