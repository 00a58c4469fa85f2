"""Notices that peers have closed connections which nobody reads at the moment."""

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable

from lp_pipe.connections.thread_locks import release_if_held_here

_AN_END = select.EPOLLRDHUP | select.EPOLLONESHOT if hasattr(select, "epoll") else 0


class Ends:
    """One thread per process waits for the ends of all connections, and for nothing else that they bring."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the child has no such thread, and must not use its epoll

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._epoll: select.epoll | None = None
        self._watched: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}

    def recover(self) -> None:
        """Give back the lock, where an exception has interrupted the calling thread between two bytecodes."""
        release_if_held_here(self._lock)

    def watch(self, descriptor: int, on_end: Callable[[], object]) -> None:
        """Call `on_end`, a bound method that is not kept alive, once the peer has closed; `forget` before closing."""
        with self._lock:
            if self._epoll is None:
                epoll = select.epoll()
                threading.Thread(target=self._run, args=(epoll,), name="connection ends", daemon=True).start()
                self._epoll = (
                    self._epoll or epoll
                )  # not before somebody waits there: the system may have no more threads
            self._watched[descriptor] = weakref.WeakMethod(on_end)
            self._epoll.register(descriptor, _AN_END)

    def watch_again(self, descriptor: int) -> None:
        """After a call that meant another connection: one that had this descriptor before."""
        with self._lock:
            if descriptor in self._watched and self._epoll is not None:
                self._epoll.modify(descriptor, _AN_END)

    def forget(self, descriptor: int) -> None:
        """Watch no more."""
        with self._lock:
            if self._watched.pop(descriptor, None) is not None and self._epoll is not None:
                with contextlib.suppress(OSError):  # interrupted code may have watched it before it could register it
                    self._epoll.unregister(descriptor)

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for descriptor, _ in epoll.poll():
                found = self._watched.get(descriptor)
                on_end = found and found()
                if on_end:
                    on_end()


shared = Ends()
