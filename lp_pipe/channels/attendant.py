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


class Attention:
    """To one connection. on_read: called when the attendant has read, and leaves the reading to others."""

    def __init__(self, attendant: "Attendant", connection: PulledConnection, on_read: Callable[[], object]) -> None:
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


class Attendant:
    """One thread per process, for all connections that were given to it."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the child has no such thread, and must not use its epoll

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._attended: dict[int, Attention] = {}

    def attend(self, connection: PulledConnection, on_read: Callable[[], object]) -> Attention:
        """From now on, until it ends, read what arrives there whenever no other thread does."""
        attention = Attention(self, connection, on_read)
        with self._lock:
            if attention.descriptor < 0:
                return attention  # it has ended already
            if self._epoll is None:
                epoll = select.epoll()
                threading.Thread(target=self._run, args=(epoll,), name="attend channels", daemon=True).start()
                self._epoll = epoll  # not before somebody waits there: the system may have no more threads
            self._attended[attention.descriptor] = attention
            self._epoll.register(attention.descriptor, _PAUSED)
        attention.resume()
        return attention

    def set(self, attention: Attention, events: int) -> None:
        if attention.connection.closed_reason is not None:
            self.forget(attention)
            return
        with self._lock:
            if self._attended.get(attention.descriptor) is attention and self._epoll is not None:
                with contextlib.suppress(OSError):  # it is being closed
                    self._epoll.modify(attention.descriptor, events)

    def forget(self, attention: Attention) -> None:
        """The kernel does so when the descriptor is closed; another connection may have it by now."""
        with self._lock:
            if self._attended.get(attention.descriptor) is attention:
                del self._attended[attention.descriptor]

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for descriptor, _ in epoll.poll():
                attention = self._attended.get(descriptor)
                if attention is not None and attention.connection.try_reading():  # else its reader resumes
                    self._read(attention)

    def _read(self, attention: Attention) -> None:
        try:
            if attention.connection.is_ready():
                with contextlib.suppress(Exception):  # it has ended the connection, and is its reason
                    attention.connection.read()
        finally:
            attention.leave()
        attention.on_read()


shared = Attendant()
