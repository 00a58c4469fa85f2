"""Threads of pools that are closed: the interpreter's end waits a moment for them.

They are daemons, so that a handler which never returns does not keep the interpreter alive. But one that is inside of
torch at that moment, where it frees the last step's graph, say, ends the process by SIGABRT ("terminate called without
an active exception"): Python unwinds it through C++ that forbids that.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Iterable

_PATIENCE_S = 1.0  # for all together

_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def will_end(threads: Iterable[threading.Thread]) -> None:
    """They do, after the task that each is at."""
    _threads.update(threads)


@atexit.register
def _wait_for_them() -> None:
    deadline = time.monotonic() + _PATIENCE_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
