"""Does something when an object has gone, whenever that is before the interpreter's exit.

In place of weakref.finalize, whose table the interpreter goes through as it exits: where a thread that still runs makes
or loses an entry meanwhile, it stops with "dictionary changed size during iteration", and what others have in that
table, such as temporary folders, is left behind.
"""

import atexit
import weakref
from collections.abc import Callable
from typing import Any


class _Watch(weakref.ref[Any]):
    __slots__ = ("args", "do")
    do: Callable[..., object]
    args: tuple[Any, ...]


_watched: dict[int, _Watch] = {}  # by id: the referents need not be hashable
atexit.register(_watched.clear)  # threads that it would need are about to end


def when_gone(thing: object, do: Callable[..., object], *args: Any) -> None:
    """Call do(*args), which must not keep the thing, in the thread in which the last reference to it goes."""
    watch = _Watch(thing, _gone)
    watch.do, watch.args = do, args
    _watched[id(watch)] = watch


def _gone(watch: _Watch) -> None:
    _watched.pop(id(watch), None)
    watch.do(*watch.args)
