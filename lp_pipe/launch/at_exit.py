"""Wait for running programs at the interpreter's end (in a script), or stop them (in any other process)."""

import atexit
import os
import sys
from types import ModuleType
from typing import Protocol

from lp_pipe.errors import NodeError
from lp_pipe.private_python import call_before_threads_are_joined, run_exit_functions


class _Launched(Protocol):
    """The methods of a run that are needed at the interpreter's end."""

    def wait(self) -> None: ...

    def stop_unfinished(self, error: BaseException | None = None) -> None: ...

    def stop(self) -> None: ...


active_runs: set[_Launched] = set()  # not a WeakSet: a run that ends during an iteration would break it off
failed_runs: set[_Launched] = set()  # have ended without the script knowing: it has called neither wait() nor stop()


def _forget_runs() -> None:
    """Forget the launcher's runs in a forked child (a DataLoader's worker), which must not wait for or stop them."""
    active_runs.clear()
    failed_runs.clear()


os.register_at_fork(after_in_child=_forget_runs)

_TEST_RUNNERS = {"unittest", "nose2", "trial"}


def stop_active_runs() -> None:
    """Stop all runs in order, and wait until they have ended."""
    for run in list(active_runs):
        run.stop()


def _end_runs() -> None:
    """Wait for the runs of a script that has ended normally, as Launchpad does. Stop those of any other interpreter.

    A run that has failed before the script's end is reported like one that fails afterwards.
    """
    if _is_at_end_of_script():
        status = max([_wait_for(run) for run in {*failed_runs, *active_runs}], default=0)
        if status:
            atexit.register(_exit_with, status)
        return
    error = None if _is_interactive() else getattr(sys, "last_value", None)
    for run in list(active_runs):
        run.stop_unfinished(error)
    stop_active_runs()


def _is_at_end_of_script() -> bool:
    """Return whether a script's main module has run to its end: no traceback, no prompt, no test runner."""
    main = sys.modules.get("__main__")
    return main is not None and not (hasattr(sys, "last_value") or _is_interactive() or _is_test_runner(main))


def _is_interactive() -> bool:
    ipython = sys.modules.get("IPython")
    is_notebook = ipython is not None and ipython.get_ipython() is not None
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or is_notebook


def _is_test_runner(main: ModuleType) -> bool:
    spec = getattr(main, "__spec__", None)
    return "_pytest" in sys.modules or (spec is not None and spec.name.partition(".")[0] in _TEST_RUNNERS)


def _wait_for(run: _Launched) -> int:
    """Wait for a run and return its exit status. A failure is printed like an uncaught exception."""
    try:
        run.wait()
    except NodeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    except KeyboardInterrupt as error:  # the run has been stopped
        return getattr(error, "code", 130)
    return 0


def _exit_with(status: int) -> None:
    """Finish the interpreter's exit with this status, which cannot be set in any other way at this point.

    It was registered last, so it is the first exit function to run, and runs the others itself.
    """
    atexit.unregister(_exit_with)
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(status)


# Must run before the interpreter joins its threads, because threads of nodes wait for the stop; atexit functions run
# after that. Registered after concurrent.futures, and so called before it, because its workers may wait for the stop.
call_before_threads_are_joined(_end_runs)
