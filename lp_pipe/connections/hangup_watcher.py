"""Notices that peers have closed connections that no thread reads at the moment."""

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable

from lp_pipe.private_python import release_if_held_here

_HANGUP_EVENTS = select.EPOLLRDHUP | select.EPOLLONESHOT if hasattr(select, "epoll") else 0


class HangupWatcher:
    """A thread, one per process, that waits for hangups of all connections, and for nothing else that they bring."""

    def __init__(self) -> None:
        self._reset()
        # the child has no such thread, and must not use its parent's epoll
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._epoll: select.epoll | None = None
        self._watched: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}

    def recover(self) -> None:
        """Release the lock if an exception interrupted the calling thread while it held it."""
        release_if_held_here(self._lock)

    def watch(self, descriptor: int, on_end: Callable[[], object]) -> None:
        """Call `on_end` once the peer has closed; call `forget` before closing the descriptor.

        on_end: a bound method, which is not kept alive.
        """
        with self._lock:
            if self._epoll is None:
                epoll = select.epoll()
                threading.Thread(target=self._run, args=(epoll,), name="connection hangups", daemon=True).start()
                self._epoll = self._epoll or epoll  # set after the thread has started: the system may be out of threads
            self._watched[descriptor] = weakref.WeakMethod(on_end)
            self._epoll.register(descriptor, _HANGUP_EVENTS)

    def watch_again(self, descriptor: int) -> None:
        """Watch again after `on_end` was called for an earlier connection that had this descriptor."""
        with self._lock:
            if descriptor in self._watched and self._epoll is not None:
                self._epoll.modify(descriptor, _HANGUP_EVENTS)

    def forget(self, descriptor: int) -> None:
        """Stop watching."""
        with self._lock:
            if self._watched.pop(descriptor, None) is not None and self._epoll is not None:
                with contextlib.suppress(OSError):  # interrupted code may have stored it and not registered it
                    self._epoll.unregister(descriptor)

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for descriptor, _ in epoll.poll():
                found = self._watched.get(descriptor)
                on_end = found and found()
                if on_end:
                    on_end()


shared = HangupWatcher()
