"""Every private part of Python's standard library that lp_pipe uses, each with what replaces it where it is gone.

As in `private_torch`: no other module asks for a name with a leading underscore, and each function looks the name up
when it is called.
"""

import argparse
import atexit
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any


def call_before_threads_are_joined(function: Callable[[], None]) -> None:
    """Call a function when the interpreter ends, before it waits for its threads. Last come, first served.

    Lost: the interpreter calls it after that, so a script must stop the threads of its nodes itself.
    """
    importlib.import_module("concurrent.futures.thread")  # has registered before: its workers may wait for `function`
    getattr(threading, "_register_atexit", atexit.register)(function)


def join_all_threads() -> None:
    """Join the threads that are not daemons, and executors' work, as the interpreter's end does. Lost: they are not."""
    getattr(threading, "_shutdown", lambda: None)()


def run_exit_functions() -> None:
    """Call what atexit has registered, in a process that ends by os._exit. Lost: it is not called."""
    getattr(atexit, "_run_exitfuncs", lambda: None)()


def interpreter_flags() -> list[str]:
    """Return this interpreter's flags, for a new one: -O, -W, -X dev. Lost: only -O and -W."""
    flags = getattr(subprocess, "_args_from_interpreter_flags", None)
    return flags() if flags is not None else ["-O"] * sys.flags.optimize + [f"-W{option}" for option in sys.warnoptions]


def is_foreign(thread: threading.Thread) -> bool:
    """Return whether a library made the thread outside of Python, which knows it only since it has called Python."""
    return isinstance(thread, getattr(threading, "_DummyThread", ()))


def target_of(thread: threading.Thread) -> Any:
    """Return the function that the thread runs; None if that is unknown."""
    return getattr(thread, "_target", None)


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of all options of a parser. Lost: none, so that a misspelt one is not corrected."""
    return [option for action in getattr(parser, "_actions", ()) for option in action.option_strings]
