"""The end of the interpreter while programs run: a script waits for its programs, anything else stops them."""

import atexit
import os
import sys
from types import ModuleType
from typing import Protocol

from lp_pipe.errors import NodeError
from lp_pipe.private_python import call_before_threads_are_joined, run_exit_functions


class _Launched(Protocol):
    """A run."""

    def wait(self) -> None: ...

    def stop_unfinished(self) -> None: ...

    def stop(self) -> None: ...


active_runs: set[_Launched] = set()  # no WeakSet: a run that ends while one is looked through would break that off
failed_runs: set[_Launched] = set()  # have ended, and the script has not been told: no wait(), no stop()


def _forget_runs() -> None:
    """Let a forked child, such as a DataLoader's worker, neither wait for the launcher's runs nor stop them."""
    active_runs.clear()
    failed_runs.clear()


os.register_at_fork(after_in_child=_forget_runs)

_TEST_RUNNERS = {"unittest", "nose2", "trial"}


def stop_active_runs() -> None:
    """Stop every run in order, and return when nothing of them is left."""
    for run in list(active_runs):
        run.stop()


def _end_runs() -> None:
    """Wait for the runs of a script that has ended normally, as Launchpad does; stop those of any other interpreter.

    A run that had failed before the script's end is reported like one that fails afterwards.
    """
    if _is_at_end_of_script():
        status = max([_wait_for(run) for run in {*failed_runs, *active_runs}], default=0)
        if status:
            atexit.register(_exit_with, status)
        return
    for run in list(active_runs):
        run.stop_unfinished()
    stop_active_runs()


def _is_at_end_of_script() -> bool:
    """Return whether a script's main module has run to its end: no traceback, no prompt, no test runner."""
    main = sys.modules.get("__main__")
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive or _is_notebook()
    return main is not None and not (hasattr(sys, "last_value") or is_interactive or _is_test_runner(main))


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _is_test_runner(main: ModuleType) -> bool:
    spec = getattr(main, "__spec__", None)
    return "_pytest" in sys.modules or (spec is not None and spec.name.partition(".")[0] in _TEST_RUNNERS)


def _wait_for(run: _Launched) -> int:
    """Return the exit status that the end of the run asks for; a failure is printed as an uncaught exception is."""
    try:
        run.wait()
    except NodeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    except KeyboardInterrupt as error:  # the run is down
        return getattr(error, "code", 130)
    return 0


def _exit_with(status: int) -> None:
    """Finish the interpreter's exit with this status, which Python offers no other way to set by now.

    Registered last, it runs first of the exit functions, so it runs the others itself.
    """
    atexit.unregister(_exit_with)
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(status)


# Before the interpreter joins its threads, which atexit comes after: threads of nodes wait for the stop. And after
# concurrent.futures has registered the same way (last come, first served), for its workers may wait for it too.
call_before_threads_are_joined(_end_runs)
