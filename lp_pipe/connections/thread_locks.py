"""Locks that a thread can find in its own hands: a signal handler, `__del__` or trace function may interrupt it anywhere.

Code that runs in the middle of an interrupted critical section must not wait for the lock of that section, which only
the interrupted code below it on the same stack can release.
"""

from threading import get_ident
from typing import Any


def is_held_here(lock: Any) -> bool:
    """Return whether the calling thread holds this RLock (or the lock of this Condition)."""
    held: bool = lock._is_owned()
    return held


def release_if_held_here(lock: Any) -> None:
    """Release an RLock that an exception of a signal handler has left locked, between two bytecodes."""
    while is_held_here(lock):
        lock.release()


class Claim:
    """The right to do something, which one thread has at a time; nobody waits for it.

    Taking it and saying which thread has it is one step, so that an interruption never leaves it without an owner.
    """

    __slots__ = ("_holder",)

    def __init__(self) -> None:
        self._holder: dict[int, tuple[int]] = {}

    def take(self) -> bool:
        """Take it for the calling thread; False when it is taken, also by this very thread."""
        holder = (get_ident(),)
        return self._holder.setdefault(0, holder) is holder

    def give_back(self) -> None:
        """Let another thread take it."""
        self._holder.pop(0, None)

    def keep(self) -> None:
        """Let nobody take it any more; for the thread that has it."""
        self._holder[0] = (0,)

    def is_here(self) -> bool:
        """Return whether the calling thread has it."""
        holder = self._holder.get(0)
        return holder is not None and holder[0] == get_ident()
