"""The work that a node leaves to the end of its process: threads that are not daemons, exit functions, open files."""

import atexit
import contextlib
import gc
import io
import logging
import os
import signal
import stat
import sys
import threading
import time
import traceback
from types import FrameType

from lp_pipe.launch.at_exit import active_runs
from lp_pipe.telemetry.waits import place_of

_TERM_TO_EXIT_S = 1.0  # the same time that the launcher leaves between SIGTERM and SIGKILL
_MENTIONED_AFTER_S = 10.0

_log = logging.getLogger(__name__)


class _TimeIsUp(BaseException):
    """Raised in the main thread to leave a wait for a thread, or an exit function."""


def finish_work(node: str, stop_event: threading.Event, limit_s: float | None) -> None:
    """Join the threads of this process, run its exit functions and flush its files.

    Python does so at the end of every process, but leaves files alone that the frame of a daemon thread can reach.
    SIGTERM, which the launcher sends when the grace period of a stop is over, ends the wait, with a warning that names
    what is cut off. limit_s: ends it as well; for a node that has failed, whose restart must not wait for ever.
    stop_event: of the node; programs that it has launched itself, for which Python's end waits, are stopped then.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: _cut_off(node))
    seconds, action = (_MENTIONED_AFTER_S, _mention) if limit_s is None else (limit_s, _end_by_force)
    timer = threading.Timer(seconds, action, (node,))
    timer.daemon = True
    timer.start()
    if active_runs:
        threading.Thread(target=_stop_own_runs, args=(stop_event,), name="stop own runs", daemon=True).start()
    for step in (threading._shutdown, atexit._run_exitfuncs, _flush_files):  # type: ignore[attr-defined]
        try:
            step()
        except _TimeIsUp:
            continue
        except BaseException:  # a thread's exit function: the others must run all the same
            traceback.print_exc()
    timer.cancel()


def _stop_own_runs(stop_event: threading.Event) -> None:
    stop_event.wait()
    for run in list(active_runs):
        run.stop_unfinished()


def _flush_files() -> None:
    """Write what the node's open files still buffer; pipes and sockets are left out, because their writes may block."""
    for found in gc.get_objects():  # all but what the template had made before its fork
        if type(found) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom) and not found.closed:
            with contextlib.suppress(OSError, ValueError):  # a full disk, or another thread has just closed it
                if stat.S_ISREG(os.fstat(found.fileno()).st_mode):
                    found.flush()


def _cut_off(node: str) -> None:
    """Runs in the main thread, as a signal handler."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the exit functions that are left have until SIGKILL
    _log.warning("node %s: its process must end, and cuts off what still runs: %s", node, ", ".join(_unfinished()))
    raise _TimeIsUp("the time that the node's process had for this is over")


def _end_by_force(node: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_TERM_TO_EXIT_S)
    os._exit(1)


def _mention(node: str) -> None:
    _log.warning("node %s: its code has ended, and its process still waits for %s", node, ", ".join(_unfinished()))


def _unfinished() -> list[str]:
    """Name the threads and child processes that are not daemons, and the exit function that runs."""
    frames = sys._current_frames()
    main = threading.main_thread()
    found = [
        f"thread {thread.name!r}{_at(frames.get(thread.ident or 0))}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not main
    ]
    children = sys.modules.get("multiprocessing.process")
    if children is not None:
        found += [f"process {child.name!r}" for child in children.active_children() if not child.daemon]
    return found or [f"an exit function{_at(frames.get(main.ident or 0))}"]


def _at(frame: FrameType | None) -> str:
    place = place_of(frame)
    return f" (at {place})" if place else ""
