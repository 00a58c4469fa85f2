"""The threads of a server: those that run handlers also read the callers' sockets, which saves a thread switch."""

import contextlib
import functools
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from lp_pipe.connections import PulledConnection
from lp_pipe.context import current_context
from lp_pipe.rpc.daemon_pool import join_at_exit

_log = logging.getLogger(__name__)


_PoolTask = tuple[Callable[..., Any], tuple[Any, ...]]


class ReaderPool:
    """A pool of at most `size` daemon threads, started as work comes in; they belong to the node that made the pool.

    Each thread waits for a task or a readable socket, whichever comes first, reads, and runs what it has read itself.
    Only when all are busy does one more thread read on, so that credits, cancelled calls and closed connections are
    seen.
    Tasks must not raise.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._node = current_context()
        self._tasks: deque[_PoolTask] = deque()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._readers: set[int] = set()  # threads that are reading, and check for tasks afterwards
        self._idle = 0  # the number of threads that run no task: they wait, or read
        self._reserve: threading.Thread | None = None
        self._reserve_is_needed = threading.Lock()
        self._alive = 0
        self._needs_more_threads = False
        self._is_closed = False
        self._waiting = _TaskWaiter(size + 1)

    def submit(self, task: Callable[..., Any], *args: Any) -> None:
        self._tasks.append((task, args))
        if threading.get_ident() not in self._readers:
            self._wake_idle_thread()

    def discard(self) -> list[_PoolTask]:
        """Remove and return the tasks that have not begun."""
        tasks: list[_PoolTask] = []
        with contextlib.suppress(IndexError):
            while True:
                tasks.append(self._tasks.popleft())
        return tasks

    def read(self, connection: PulledConnection) -> None:
        """Read what arrives on this connection from now on; its `on_frame` must not block, and may `submit`."""
        if not connection.try_reading():
            return  # it has ended already
        source = _ReadySource(connection)
        try:
            self._waiting.add(connection.fileno(), source.read)
        finally:
            connection.done_reading()
        self.submit(source.read)  # for what arrived while this thread held the reader role

    def forget(self, connection: PulledConnection) -> None:
        """Stop reading a connection that has ended; call this before its descriptor is closed."""
        self._waiting.remove(connection.fileno())

    def close(self) -> None:
        """End every thread after its current task; tasks that are submitted from now on never run."""
        with self._lock:
            self._is_closed = True
            is_empty = not self._alive
            join_at_exit(self._threads)
        if is_empty:
            self._waiting.close()
        self._release_reserve()
        self._waiting.wake()

    def _wake_idle_thread(self) -> None:
        """Make sure that an idle thread takes the next task."""
        if self._idle:
            self._waiting.wake()
        elif len(self._threads) < self._size:
            self._add_thread()
        # Otherwise a busy thread checks for tasks before it rests.

    def _add_thread(self) -> None:
        with self._lock:
            if len(self._threads) < self._size and not self._is_closed:
                self._idle += 1
                thread = self._start(self._work, f"{self._name}-{len(self._threads)}")
                if thread is None:
                    self._idle -= 1
                else:
                    self._threads.append(thread)

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread | None:
        """Start a thread; None when the system has no more, so that the existing threads do the work.

        Raises:
            RuntimeError: there are no threads at all.
        """
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        # Set even if None: otherwise the thread would belong to the node that happened to bring the first task.
        thread._lp_pipe_context = self._node  # type: ignore[attr-defined]
        self._alive += 1
        try:
            thread.start()
        except RuntimeError as error:
            self._alive -= 1
            if not self._alive:
                self._idle = 0
                raise
            if not self._needs_more_threads:
                _log.warning("%s goes on with %d of %d threads: %s", self._name, self._alive, self._size, error)
            self._needs_more_threads = True
            return None
        return thread

    def _run(self, work: Callable[[], None]) -> None:
        if self._node is not None:
            self._node.prepare_thread()
        while not self._is_closed:
            work()
        with self._lock:
            self._alive -= 1
            is_last = not self._alive
        if is_last:
            self._waiting.close()
        else:
            self._waiting.wake()  # the next thread ends as well

    def _work(self) -> None:
        if self._tasks:
            self._run_next()
        else:
            self._read_next()

    def _run_next(self) -> None:
        with self._lock:
            self._idle -= 1
            is_last = not self._idle
        try:
            function, args = self._tasks.popleft()
        except IndexError:  # another thread was faster
            pass
        else:
            if is_last:
                self._keep_reading()
            elif self._tasks:
                self._waiting.wake()
            function(*args)
            del function, args  # a waiting thread must not keep the last call's tensors alive
        with self._lock:
            self._idle += 1

    def _read_next(self) -> None:
        """Wait for a task or for data from a caller; read the data."""
        ident = threading.get_ident()
        read = self._waiting.wait()
        if read is not None:
            self._readers.add(ident)
            try:
                read()
            finally:
                self._readers.discard(ident)

    def _keep_reading(self) -> None:
        """Make sure that a thread reads on when the last idle one begins a task."""
        if len(self._threads) < self._size:
            self._add_thread()
            return
        if self._reserve is None:
            with self._lock:
                if self._reserve is None and not self._is_closed:
                    self._reserve = self._start(self._work_in_reserve, f"{self._name}-reader")
        self._release_reserve()

    def _release_reserve(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is released already
            self._reserve_is_needed.release()

    def _work_in_reserve(self) -> None:
        if not self._idle:
            self._read_next()
            return
        if self._tasks:
            self._waiting.wake()
        self._reserve_is_needed.acquire()


class _ReadySource:
    """A connection that may be reported as ready to several threads: one reads, and checks again for the others."""

    def __init__(self, connection: PulledConnection) -> None:
        self._connection = connection
        self._is_ready = self._is_at_end = False

    def read(self, *, is_at_end: bool = False) -> None:
        """Read what has arrived.

        is_at_end: the peer has closed, which is reported only once: read up to the end.
        """
        self._is_ready = True
        self._is_at_end |= is_at_end
        while self._is_ready and self._connection.try_reading():
            try:
                self._is_ready = False
                self._connection.read()
                if self._is_at_end and self._connection.closed_reason is None and self._connection.is_ready():
                    self._is_ready = True  # the read ended where the data ended
            finally:
                self._connection.done_reading()


class _TaskWaiter:
    """Wakes waiting threads one at a time, by `wake` or when a descriptor becomes readable.

    Its own two descriptors are made with the first descriptor that is added: a thousand servers in threads of one
    process need none.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._epoll: select.epoll | None = None
        self._event = -1
        self._is_closed = False
        self._actions: dict[int, Callable[..., None]] = {}

    def add(self, descriptor: int, action: Callable[..., None]) -> None:
        """Call `action()` when the descriptor is readable, and `action(is_at_end=True)` when the peer has closed."""
        with self._lock:
            if self._is_closed:
                return
            if self._epoll is None:
                self._open()
            self._actions[descriptor] = action
            assert self._epoll is not None
            # Edge-triggered: otherwise every other thread would wake while one reads.
            self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def remove(self, descriptor: int) -> None:
        self._actions.pop(descriptor, None)

    def wake(self) -> None:
        """Make one thread check for work: one that waits, or else the next one that would wait."""
        if self._epoll is None:
            self._tokens.put(None)
            return
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def wait(self) -> Callable[[], None] | None:
        """Return the function to call for a readable descriptor; None after `wake`."""
        if self._epoll is None:
            self._tokens.get()
            return None
        for descriptor, events in self._epoll.poll(maxevents=1):
            action = self._actions.get(descriptor)
            if action is not None and events & select.EPOLLRDHUP:
                return functools.partial(action, is_at_end=True)
            return action
        return None

    def close(self) -> None:
        """Close the descriptors; no thread waits any more."""
        with self._lock:
            self._is_closed = True
            if self._epoll is not None and self._event >= 0:
                self._epoll.close()
                os.close(self._event)
                self._event = -1

    def _open(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        epoll = select.epoll()
        epoll.register(self._event, select.EPOLLIN | select.EPOLLET)
        self._epoll = epoll
        for _ in range(self._threads):  # threads that wait for tokens change over to epoll
            self._tokens.put(None)
