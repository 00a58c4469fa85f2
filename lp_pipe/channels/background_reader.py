"""A thread that reads channels' connections while their owners compute.

A thread that waits for a value reads the connection itself, without a hop between threads.
"""

import contextlib
import os
import select
import threading
from collections.abc import Callable

from lp_pipe.connections import PulledConnection

# ONESHOT is set even without events: epoll reports hang-ups in any case, and would do so for ever while a forked child
# has the socket.
_HAS_EPOLL = hasattr(select, "epoll")
_PAUSED = select.EPOLLONESHOT if _HAS_EPOLL else 0
# Smaller amounts may wait in the system's buffers: a thread that wakes up for them takes a core from the computation.
_WORTH_WAKING_BYTES = 1 << 18
_EAGER_BYTES = 1 << 16  # of a frame that has arrived in part
_RECORD_BYTES = 17 << 10
_ARMED = select.EPOLLIN | select.EPOLLRDHUP | _PAUSED if _HAS_EPOLL else 0


class WatchedConnection:
    """A connection that the background reader reads while its owner does not.

    on_read: called when the background reader has read, and another thread may read.
    """

    def __init__(self, reader: "BackgroundReader", connection: PulledConnection, on_read: Callable[[], object]) -> None:
        self.connection = connection
        self.descriptor = connection.fileno()
        self.on_read = on_read
        self._reader = reader

    def pause(self) -> None:
        """Leave the reading to the owner, which is the one thread that reads now."""
        self._reader.set(self, _PAUSED)
        self.connection.be_ready_at(1)

    def resume(self) -> None:
        """Let the background reader read: the owner does something else."""
        self.connection.be_ready_at(self._worth_waking_bytes())
        self._reader.set(self, _ARMED)

    def leave(self) -> None:
        """Stop reading, as the one thread that reads; other threads may read now, also the background reader."""
        self.connection.be_ready_at(self._worth_waking_bytes())  # first: the next reader must wake at the first byte
        self.connection.done_reading()
        self._reader.set(self, _ARMED)

    def _worth_waking_bytes(self) -> int:
        """Return how much must arrive to wake the background reader up."""
        if not self._reader.is_eager:
            return _WORTH_WAKING_BYTES
        # TLS may have taken a part of its next record already, which the kernel does not count.
        return max(1, min(_EAGER_BYTES, self.connection.missing_bytes - _RECORD_BYTES))


class BackgroundReader:
    """A background thread of a process, which reads all connections given to `watch`.

    is_eager: whether it reads each frame once that has arrived; else less than 256 KiB stay in the system's buffers.
    """

    def __init__(self, *, is_eager: bool = False) -> None:
        self.is_eager = is_eager
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a child lacks the thread, and must not use this epoll

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._watched: dict[int, WatchedConnection] = {}

    def watch(self, connection: PulledConnection, on_read: Callable[[], object]) -> WatchedConnection:
        """Read what arrives on the connection, until it ends, whenever no other thread does."""
        watched = WatchedConnection(self, connection, on_read)
        with self._lock:
            if watched.descriptor < 0:
                return watched  # the connection has ended already
            if self._epoll is None:
                epoll = select.epoll()
                threading.Thread(target=self._run, args=(epoll,), name="watch channels", daemon=True).start()
                self._epoll = epoll  # set only once a thread waits on it: starting one may fail
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
        """Forget the connection. The kernel forgets its descriptor, which may be another connection's by now."""
        with self._lock:
            if self._watched.get(watched.descriptor) is watched:
                del self._watched[watched.descriptor]

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for descriptor, _ in epoll.poll():
                watched = self._watched.get(descriptor)
                if watched is not None and watched.connection.try_reading():  # else its reader resumes the watch
                    self._read(watched)

    def _read(self, watched: WatchedConnection) -> None:
        try:
            if watched.connection.is_ready():
                with contextlib.suppress(Exception):  # it has ended the connection, as its reason
                    watched.connection.read()
        finally:
            watched.leave()
        watched.on_read()


shared = BackgroundReader()
eager = BackgroundReader(is_eager=True)  # for connections without an owner that reads them while it waits
