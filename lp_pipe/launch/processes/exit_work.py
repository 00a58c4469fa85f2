"""Finish a node's work at the end of its process: non-daemon threads, exit functions, open files."""

import contextlib
import ctypes
import functools
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
import warnings
import weakref
from collections.abc import Callable, Collection, Container
from types import FrameType, FunctionType, ModuleType

from lp_pipe.launch.at_exit import active_runs
from lp_pipe.private_python import join_all_threads, run_exit_functions
from lp_pipe.telemetry.tracebacks import is_of_user
from lp_pipe.telemetry.waits import place_of

_TERM_TO_EXIT_S = 1.0  # the same time that the launcher leaves between SIGTERM and SIGKILL
_MENTIONED_AFTER_S = 10.0

_COMPRESSED = ("gzip", "bz2", "lzma")

_log = logging.getLogger(__name__)


class _TimeIsUp(BaseException):
    """Raised in the main thread to interrupt an exit function, or the wait for a thread."""


def finish_work(node: str, stop_event: threading.Event, limit_s: float | None, kept: Container[str] | None) -> None:
    """Join the threads of this process, run its exit functions, finalize what user modules hold, and flush files.

    Python does the same at the end of a process, but does not flush files that the frame of a daemon thread can reach.
    SIGTERM, which the launcher sends after the grace period of a stop, ends the wait, with a warning that names what is
    cut off.

    limit_s: ends the wait as well. For a failed node, because its restart must not wait for ever.
    kept: the names of modules that were loaded before the node's own; None if Python's own finalization follows.
    stop_event: of the node. At the stop, programs that the node itself has launched are stopped, too, since exit
        functions wait for them.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: _cut_off(node))
    seconds, action = (_MENTIONED_AFTER_S, _mention) if limit_s is None else (limit_s, _end_by_force)
    timer = threading.Timer(seconds, action, (node,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # out of threads
        timer.start()
    if active_runs:
        threading.Thread(target=_stop_own_runs, args=(stop_event,), name="stop own runs", daemon=True).start()
    steps: list[Callable[[], object]] = [join_all_threads, run_exit_functions, _flush_files]
    if kept is not None:
        steps += [functools.partial(_drop_modules, kept), _flush_files]
    for step in steps:
        try:
            step()
        except _TimeIsUp:
            continue
        except BaseException:  # of one exit function; the others must run, too
            traceback.print_exc()
    timer.cancel()


def _stop_own_runs(stop_event: threading.Event) -> None:
    stop_event.wait()
    for run in list(active_runs):
        run.stop_unfinished()


def _drop_modules(kept: Container[str]) -> None:
    """Finalize the objects that only the user's modules hold, because a `__del__` may have work to do.

    Python's own finalization does this with all modules. It also ends daemon threads, which aborts the process if one
    of them is inside torch. Objects are dropped before the functions and constants that their `__del__` may use. Those
    in containers and cycles follow in the collector's order.
    """
    threading.excepthook = lambda arguments: None  # daemon threads go on, and may fail at a dropped global
    warnings.simplefilter("ignore", ResourceWarning)  # for connections that end with the process
    names = {name for name, module in list(sys.modules.items()) if name not in kept and _is_of_user(module)}
    _drop_globals(names)
    modules = [weakref.ref(sys.modules.pop(name)) for name in names]
    gc.collect()
    for found in modules:
        module = found()
        for name in (
            list(vars(module)) if module is not None else ()
        ):  # None: a package that is not the user's keeps it alive
            if name != "__builtins__":
                vars(module)[name] = None
        del module
    gc.collect()


def _drop_globals(names: Collection[str]) -> None:
    """Drop the variables of these modules, and of functions sent by value, if the value has a `__del__`."""
    functions = (found for found in gc.get_objects() if type(found) is FunctionType)
    scopes = {id(one.__globals__): one.__globals__ for one in functions if one.__globals__.get("__name__") in names}
    for scope in [*scopes.values(), *(vars(sys.modules[name]) for name in names)]:
        for name, value in list(scope.items()):
            if hasattr(type(value), "__del__"):
                scope[name] = value = None


def _is_of_user(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return is_of_user(file) if isinstance(file, str) else getattr(module, "__spec__", None) is None


def _flush_files() -> None:
    """Flush the node's open files. Pipes and sockets are left out, because writes to them may block.

    Compressed files are closed. Otherwise their ends would be missing, because the collector may finalize the files
    that they write to first.
    """
    found = gc.get_objects()  # without the objects that the template had made before its fork
    for text in (one for one in found if type(one) is io.TextIOWrapper):
        _flush(text)
    for packed in (one for one in found if _is_compressed_file(type(one))):
        with contextlib.suppress(Exception):
            packed.close()
    for binary in (one for one in found if type(one) in (io.BufferedWriter, io.BufferedRandom)):
        _flush(binary)
    ctypes.CDLL(None).fflush(None)  # the output of extensions in C


def _is_compressed_file(kind: type) -> bool:
    """Return whether it is a type of compressed files. By type, because `isinstance` would ask a proxy's target."""
    return kind.__module__ in _COMPRESSED and issubclass(kind, io.BufferedIOBase)


def _flush(file: io.IOBase) -> None:
    with contextlib.suppress(
        OSError, ValueError
    ):  # the disk is full, or another thread has closed or not yet opened the file
        if not file.closed and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.flush()


def _cut_off(node: str) -> None:
    """Interrupt the main thread. Runs there, as a signal handler."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the remaining exit functions have time until SIGKILL
    _log.warning(
        "node %s: its time to end is over; its process ends although this still runs: %s",
        node,
        ", ".join(_unfinished()),
    )
    raise _TimeIsUp("the time for the end of the node's process is over")


def _end_by_force(node: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_TERM_TO_EXIT_S)
    os._exit(1)


def _mention(node: str) -> None:
    _log.warning("node %s: its code has ended, but its process still waits for %s", node, ", ".join(_unfinished()))


def _unfinished() -> list[str]:
    """Return what the process waits for: non-daemon threads and child processes, or an exit function."""
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
