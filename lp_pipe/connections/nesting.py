"""The number of client operations that each thread is in the middle of.

A signal handler, `__del__`, a callback of the garbage collector or a trace function runs on top of the code that it
interrupts. If that code is a call, it may hold the connection's locks, and its thread may be the reader of the
connection; it goes on only after the interrupting code has returned. So a call inside another one uses a connection of
its own, one per depth: within one connection a thread is in at most one operation.
"""

from threading import get_ident

depths: dict[int, int] = {}  # by thread ident; 0 or missing: the thread is in no operation

_BACKGROUND = 1 << 20  # deeper than any thread's own calls


class in_background:
    """A context for what a thread does for others, such as reading: only interrupting code makes calls inside it."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = depths.get(get_ident(), 0)
        depths[get_ident()] = _BACKGROUND

    def __exit__(self, *_: object) -> None:
        depths[get_ident()] = self._before
