"""How many client operations the calling thread is in the middle of.

A signal handler, `__del__`, a callback of the garbage collector or a trace function runs on top of what it interrupts.
If that is a call, it may hold the connection's locks, and be the one thread that reads the connection; it goes on only
after the interrupter has returned. So a call that is made inside of another uses a connection of its own, one for each
depth: within one connection a thread is in at most one operation.
"""

from threading import get_ident

depths: dict[int, int] = {}  # by thread; 0, or none: it is in no operation

_BACKGROUND = 1 << 20  # deeper than any thread's own calls


class in_background:
    """Around what a thread does for others, such as reading: only what interrupts it, like `__del__`, calls there."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = depths.get(get_ident(), 0)
        depths[get_ident()] = _BACKGROUND

    def __exit__(self, *_: object) -> None:
        depths[get_ident()] = self._before
