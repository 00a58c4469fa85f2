"""An interpreter that exits without stop() takes its nodes down."""

import importlib
import os
import threading
from typing import Protocol


class _Stoppable(Protocol):
    """A run."""

    def stop_unfinished(self) -> None: ...

    def stop(self) -> None: ...


active_runs: set[_Stoppable] = set()  # no WeakSet: a run that ends while one is looked through would break that off
# The launcher's children, such as a DataLoader's workers, have none: they would wait for what is not theirs to stop.
os.register_at_fork(after_in_child=active_runs.clear)


def stop_active_runs() -> None:
    """In order; returns when nothing of them is left."""
    for run in list(active_runs):
        run.stop()


def _stop_unfinished_runs() -> None:
    """It says so: in Launchpad a script that ends with `launch(program)` waits for its nodes."""
    for run in list(active_runs):
        run.stop_unfinished()
    stop_active_runs()


# Before the interpreter joins its threads, which atexit comes after: threads of nodes wait for the stop. And after
# concurrent.futures has registered the same way (last come, first served), for its workers may wait for it too.
importlib.import_module("concurrent.futures.thread")
threading._register_atexit(_stop_unfinished_runs)  # type: ignore[attr-defined]
