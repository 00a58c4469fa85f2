"""How many client operations the calling thread is in the middle of.

A signal handler, `__del__`, a callback of the garbage collector or a trace function runs on top of what it interrupts.
If that is a call, it may hold the connection's locks, and be the one thread that reads the connection; it goes on only
after the interrupter has returned. So a call that is made inside of another uses a connection of its own, one for each
depth: within one connection a thread is in at most one operation.
"""

from threading import get_ident

depths: dict[int, int] = {}  # by thread; 0, or none: it is in no operation

_BACKGROUND = 1 << 20  # deeper than any thread's own calls


class operation:
    """Around what uses a connection of this depth, except the calls themselves, which do the same in line."""

    __slots__ = ("_before", "_depth")

    def __init__(self, depth: int = _BACKGROUND) -> None:
        self._depth = depth

    def __enter__(self) -> None:
        thread = get_ident()
        self._before = depths.get(thread, 0)
        depths[thread] = max(self._before, self._depth) + 1

    def __exit__(self, *_: object) -> None:
        depths[get_ident()] = self._before


def begin_background() -> None:
    """Count all that the calling thread does from now on as one operation: it is one that reads and closes for others.

    Only what interrupts it, such as `__del__`, makes calls there.
    """
    depths[get_ident()] = _BACKGROUND


def end_background() -> None:
    """The calling thread ends; the system may give its number to another."""
    depths.pop(get_ident(), None)
