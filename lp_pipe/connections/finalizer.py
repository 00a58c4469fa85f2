"""Run a function when an object is freed, if that happens before the interpreter's exit.

Used in place of weakref.finalize. The interpreter iterates over that module's table at exit. If a running thread adds
or removes an entry meanwhile, the iteration stops with "dictionary changed size during iteration", and what others have
in the table, such as temporary folders, is left behind.
"""

import atexit
import weakref
from collections.abc import Callable
from typing import Any


class _Watch(weakref.ref[Any]):
    __slots__ = ("args", "do")
    do: Callable[..., object]
    args: tuple[Any, ...]


_watched: dict[int, _Watch] = {}  # by id, because the referents need not be hashable
atexit.register(_watched.clear)  # the threads that finalizers need are about to end


def add_finalizer(thing: object, do: Callable[..., object], *args: Any) -> None:
    """Call do(*args) in the thread that drops the last reference to `thing`; `args` must not refer to it."""
    watch = _Watch(thing, _gone)
    watch.do, watch.args = do, args
    _watched[id(watch)] = watch


def _gone(watch: _Watch) -> None:
    _watched.pop(id(watch), None)
    watch.do(*watch.args)
