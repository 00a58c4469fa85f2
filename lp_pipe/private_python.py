"""Every private part of Python's standard library and of cloudpickle that lp_pipe uses, each with its replacement.

As in `private_torch`, no other module uses a name with a leading underscore, and each function looks the name up when
it is called. "Lost" says what happens where the name is gone.
"""

import argparse
import atexit
import enum
import importlib
import logging
import subprocess
import sys
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from cloudpickle import cloudpickle


def call_before_threads_are_joined(function: Callable[[], None]) -> None:
    """Call a function at the interpreter's end, before it waits for its threads; last registered, first called.

    Lost: the interpreter calls it after that, so a script must stop the threads of its nodes itself.
    """
    importlib.import_module("concurrent.futures.thread")  # registers first: its workers may wait for `function`
    getattr(threading, "_register_atexit", atexit.register)(function)


def join_all_threads() -> None:
    """Join the threads that are not daemons, and executors' work, as the interpreter's end does.

    Lost: they are not joined.
    """
    getattr(threading, "_shutdown", lambda: None)()


def run_exit_functions() -> None:
    """Call what atexit has registered, in a process that ends by os._exit. Lost: it is not called."""
    getattr(atexit, "_run_exitfuncs", lambda: None)()


def interpreter_flags() -> list[str]:
    """Return this interpreter's flags, for a new one: -O, -W, -X dev. Lost: only -O and -W."""
    flags = getattr(subprocess, "_args_from_interpreter_flags", None)
    return flags() if flags is not None else ["-O"] * sys.flags.optimize + [f"-W{option}" for option in sys.warnoptions]


def is_foreign(thread: threading.Thread) -> bool:
    """Return whether a library made the thread outside of Python, so that Python knows it only from its calls."""
    return isinstance(thread, getattr(threading, "_DummyThread", ()))


def target_of(thread: threading.Thread) -> Any:
    """Return the function that the thread runs; None if that is unknown."""
    return getattr(thread, "_target", None)


def is_held_here(lock: Any) -> bool:
    """Return whether the calling thread holds this RLock (or the lock of this Condition)."""
    is_owned = getattr(lock, "_is_owned", None)
    if is_owned is not None:
        held: bool = is_owned()
        return held
    try:
        (lock if isinstance(lock, threading.Condition) else threading.Condition(lock)).notify(0)
    except RuntimeError:
        return False
    return True


def holder_check(lock: Any) -> Callable[[], bool]:
    """Return a function that returns `is_held_here(lock)`, for where that is needed often. Lost: it is slower."""
    is_owned: Callable[[], bool] | None = getattr(lock, "_is_owned", None)
    return is_owned if is_owned is not None else lambda: is_held_here(lock)


def release_if_held_here(lock: Any) -> None:
    """Release an RLock that the calling thread holds.

    For locks that a signal handler's exception has left locked between two bytecodes. Code that runs on top of an
    interrupted critical section (a signal handler, `__del__`, a trace function) must not wait for the section's lock:
    only the interrupted code below it on the same stack can release that.
    """
    while is_held_here(lock):
        lock.release()


def open_log_file(handler: logging.FileHandler) -> None:
    """Open the handler's file. Lost: the handler opens it with its first line."""
    handler.stream = getattr(handler, "_open", lambda: None)()


def takes_warnings() -> bool:
    """Return whether `logging.captureWarnings` is on. Lost: no."""
    return warnings.showwarning is getattr(logging, "_showwarning", None)


def event_loop_policy(asyncio: Any) -> Any:
    """Return the policy that the script has set, if any: `asyncio.get_event_loop_policy` would make one. Lost: None."""
    return getattr(asyncio.events, "_event_loop_policy", None)


def boundary_of(kind: type[enum.Enum]) -> Any:
    """Return what a Flag does with numbers that have no member. Lost, or for another Enum: None, the default."""
    return getattr(kind, "_boundary_", None)


def data_type_of(kind: type[enum.Enum]) -> Any:
    """Return the class of the values that an Enum's members are, such as int; `object` for an Enum of plain members."""
    found = getattr(kind, "_member_type_", None)
    if found is not None:
        return found
    return next(base for base in kind.__mro__ if not issubclass(base, enum.Enum) and "__new__" in vars(base))


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of all options of a parser. Lost: none, so that a misspelt one is not corrected."""
    return [option for action in getattr(parser, "_actions", ()) for option in action.option_strings]


# ---- cloudpickle


class ClassTracker(NamedTuple):
    """The classes of other processes, by an id that a class has in each of them.

    find: returns the class with an id. id_of: returns the class's id, and gives it one if it has none. add: gives the
        id to a class and returns the class that has it from now on, which is another thread's if that came first.
    """

    find: Callable[[str], type | None]
    id_of: Callable[[type], str]
    add: Callable[[str, type], type]


def class_tracker() -> ClassTracker:
    """Return cloudpickle's tracker, so that its users and lp_pipe have the same classes. Lost: lp_pipe's own."""
    names = "_DYNAMIC_CLASS_TRACKER_BY_ID", "_get_or_create_tracker_id", "_lookup_class_or_track"
    by_id, id_of, add = (getattr(cloudpickle, name, None) for name in names)
    if by_id is None or id_of is None or add is None:
        return _OWN_TRACKER
    return ClassTracker(by_id.get, id_of, add)


def is_made_by_value(reduced: Any) -> bool:
    """Return whether cloudpickle has reduced a class to its parts, and not to its name.

    Lost: no, so that cloudpickle makes classes in its own way.
    """
    makers = [getattr(cloudpickle, name, None) for name in ("_make_skeleton_class", "_make_skeleton_enum")]
    return isinstance(reduced, tuple) and None not in makers and reduced[0] in makers


_own_lock = threading.RLock()
_own_ids: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_own_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def _own_id_of(kind: type) -> str:
    with _own_lock:
        if kind not in _own_ids:
            _add_own(uuid.uuid4().hex, kind)
        return _own_ids[kind]


def _add_own(tracked_as: str, kind: type) -> type:
    with _own_lock:
        found = _own_classes.setdefault(tracked_as, kind)
        _own_ids[found] = tracked_as
        return found


_OWN_TRACKER = ClassTracker(_own_classes.get, _own_id_of, _add_own)
