"""One thread that reads all connections of a server on its host, for handlers that return at once."""

import contextlib
import functools
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident

from lp_pipe.connections import Connection, Frame, PulledConnection
from lp_pipe.context import NodeContext
from lp_pipe.rpc.daemon_pool import DaemonPool, join_at_exit

_log = logging.getLogger(__name__)

_MOST_SENDERS = 1_000  # started as needed; each waits for one peer that does not read


class SharedReader:
    """A daemon thread that reads connections in turn, and runs what comes of it; it starts with the first one.

    Threads that each read one connection wait for Python's lock at every call: with two callers that are never idle, a
    third of the server's time. In turn means: what one read of a connection brings, then the next connection.
    """

    def __init__(self, name: str, node: NodeContext | None) -> None:
        self._name = name
        self._node = node
        self._lock = threading.Lock()  # for what `close` ends
        self._connections: dict[int, PulledConnection] = {}  # by descriptor
        self._epoll: select.epoll | None = None
        self._event = -1  # written to when the thread must end
        self._thread: threading.Thread | None = None
        self._late: dict[Connection, deque[Callable[[], None]]] = {}  # sends that may have to wait for the peer
        self._late_lock = threading.Lock()
        self._senders = DaemonPool(_MOST_SENDERS, f"send for {name}")
        self._ident = 0

    def read(self, connection: PulledConnection) -> None:
        """Read what arrives on this connection from now on; its `on_frame` must not block.

        Raises:
            RuntimeError: the system has no more threads.
        """
        with self._lock:
            if not connection.try_reading():
                return  # it has ended already
            try:
                epoll = self._start()
                self._connections[connection.fileno()] = connection
                epoll.register(connection.fileno(), select.EPOLLIN)
            finally:
                connection.done_reading()

    def forget(self, connection: PulledConnection) -> None:
        """Stop reading a connection that has ended; call this before its descriptor is closed."""
        descriptor = connection.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._unregister(descriptor)

    def is_this_thread(self) -> bool:
        """Return whether the calling code runs in the reading thread."""
        return self._ident == get_ident()

    def send_later(self, connection: Connection, send: Callable[[Frame], None], frame: Frame) -> bool:
        """Arrange that `send(frame)` is called in another thread, and return True; False if it will not have to wait.

        Until the frame is sent nothing more is read from the connection, as if this thread had to wait. Called in the
        reading thread; `send` must not raise.
        """
        if connection not in self._late and connection.has_room_for(frame.size_bytes):
            return False
        task = functools.partial(send, frame)
        with self._late_lock:
            if connection in self._late:
                self._late[connection].append(task)
                return True
            self._late[connection] = deque([task])
        self._set_events(connection, 0)
        self._senders.submit(self._send_all, connection)
        return True

    def _send_all(self, connection: Connection) -> None:
        while True:
            with self._late_lock:
                if not self._late[connection]:
                    del self._late[connection]
                    self._set_events(connection, select.EPOLLIN)
                    return
                task = self._late[connection].popleft()
            task()

    def _set_events(self, connection: Connection, events: int) -> None:
        assert isinstance(connection, PulledConnection) and self._epoll is not None
        with contextlib.suppress(OSError, ValueError):  # the connection has ended
            self._epoll.modify(connection.fileno(), events)

    def close(self) -> None:
        """End the thread after what it runs now."""
        with self._lock:
            if self._thread is not None and self._event >= 0:
                join_at_exit([self._thread])
                os.eventfd_write(self._event, 1)
        self._senders.close()

    def _start(self) -> select.epoll:
        if self._epoll is None:
            self._event = os.eventfd(0, os.EFD_CLOEXEC)
            self._epoll = select.epoll()
            self._epoll.register(self._event, select.EPOLLIN)
        if self._thread is None:
            thread = threading.Thread(target=self._run, args=(self._epoll,), name=self._name, daemon=True)
            # Set even if None: otherwise the thread would belong to the node that happened to bring the connection.
            thread._lp_pipe_context = self._node  # type: ignore[attr-defined]
            thread.start()  # stored after the start
            self._thread = thread
        return self._epoll

    def _run(self, epoll: select.epoll) -> None:
        self._ident = get_ident()
        if self._node is not None:
            self._node.prepare_thread()
        while True:
            for descriptor, _ in epoll.poll():
                connection = self._connections.get(descriptor)
                if connection is not None:
                    self._read_from(connection)
                elif descriptor == self._event:
                    with self._lock:
                        epoll.close()
                        os.close(self._event)
                        self._event = -1
                    return
                else:  # it ended as it was registered; a forked child may keep the descriptor open
                    self._unregister(descriptor)

    def _unregister(self, descriptor: int) -> None:
        if self._epoll is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed already, or epoll is
                self._epoll.unregister(descriptor)

    def _read_from(self, connection: PulledConnection) -> None:
        if connection.try_reading():
            try:
                connection.read_once()
            except Exception:  # the connection has ended, and the others go on
                _log.exception("%s: a frame could not be handled", self._name)
            finally:
                connection.done_reading()
