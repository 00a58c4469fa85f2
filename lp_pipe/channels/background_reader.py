"""Reads what arrives on channels while their owners compute; who waits for a value reads it himself, without a hop."""

import contextlib
import os
import select
import threading
from collections.abc import Callable

from lp_pipe.connections import PulledConnection

# With ONESHOT even so: epoll tells of a hang-up in any case, and while a forked child has the socket it would for ever.
_HAS_EPOLL = hasattr(select, "epoll")
_PAUSED = select.EPOLLONESHOT if _HAS_EPOLL else 0
# What fits into the system's buffers may wait there: a thread that is woken for it takes the core from who computes.
_WORTH_WAKING_BYTES = 1 << 18
_ARMED = select.EPOLLIN | select.EPOLLRDHUP | _PAUSED if _HAS_EPOLL else 0


class WatchedConnection:
    """To one connection. on_read: called when the attendant has read, and leaves the reading to others."""

    def __init__(
        self, attendant: "BackgroundReader", connection: PulledConnection, on_read: Callable[[], object]
    ) -> None:
        self.connection = connection
        self.descriptor = connection.fileno()
        self.on_read = on_read
        self._attendant = attendant

    def pause(self) -> None:
        """The owner reads now, as the one thread that does."""
        self._attendant.set(self, _PAUSED)
        self.connection.be_ready_at(1)

    def resume(self) -> None:
        """The owner has something else to do."""
        self.connection.be_ready_at(_WORTH_WAKING_BYTES)
        self._attendant.set(self, _ARMED)

    def leave(self) -> None:
        """By the one thread that reads: as `resume`, and others may read."""
        self.connection.be_ready_at(_WORTH_WAKING_BYTES)  # not later: who reads next is to wake at the first byte
        self.connection.done_reading()
        self._attendant.set(self, _ARMED)

    def end(self) -> None:
        """The owner has closed it."""
        self._attendant.forget(self)


class BackgroundReader:
    """One thread per process, for all connections that were given to it."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the child has no such thread, and must not use its epoll

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._watched: dict[int, WatchedConnection] = {}

    def watch(self, connection: PulledConnection, on_read: Callable[[], object]) -> WatchedConnection:
        """From now on, until it ends, read what arrives there whenever no other thread does."""
        watched = WatchedConnection(self, connection, on_read)
        with self._lock:
            if watched.descriptor < 0:
                return watched  # it has ended already
            if self._epoll is None:
                epoll = select.epoll()
                threading.Thread(target=self._run, args=(epoll,), name="watch channels", daemon=True).start()
                self._epoll = epoll  # not before somebody waits there: the system may have no more threads
            self._watched[watched.descriptor] = watched
            self._epoll.register(watched.descriptor, _PAUSED)
        watched.resume()
        return watched

    def set(self, watched: WatchedConnection, events: int) -> None:
        if watched.connection.closed_reason is not None:
            self.forget(watched)
            return
        with self._lock:
            if self._watched.get(watched.descriptor) is watched and self._epoll is not None:
                with contextlib.suppress(OSError):  # it is being closed
                    self._epoll.modify(watched.descriptor, events)

    def forget(self, watched: WatchedConnection) -> None:
        """The kernel does so when the descriptor is closed; another connection may have it by now."""
        with self._lock:
            if self._watched.get(watched.descriptor) is watched:
                del self._watched[watched.descriptor]

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for descriptor, _ in epoll.poll():
                watched = self._watched.get(descriptor)
                if watched is not None and watched.connection.try_reading():  # else its reader resumes
                    self._read(watched)

    def _read(self, watched: WatchedConnection) -> None:
        try:
            if watched.connection.is_ready():
                with contextlib.suppress(Exception):  # it has ended the connection, and is its reason
                    watched.connection.read()
        finally:
            watched.leave()
        watched.on_read()


shared = BackgroundReader()
