"""The threads of a server: those that run handlers also read the callers' sockets, which saves a thread switch."""

import contextlib
import functools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import get_ident
from typing import Any

from lp_pipe.connections import Connection, Frame, PulledConnection
from lp_pipe.context import current_context
from lp_pipe.errors import Unavailable
from lp_pipe.rpc.daemon_pool import join_at_exit

_log = logging.getLogger(__name__)


_PoolTask = tuple[Callable[..., Any], tuple[Any, ...]]

_QUICK_S = 0.0001  # a thread keeps its turn while its tasks take less than this
_TAKEOVER_S = 0.001  # another thread takes the turn when a task has taken longer than this
_SLOW_IN_A_ROW = 2
_SMALL_BYTES = 1 << 12
_DELAY_S = 0.0003  # how long a small reply may wait for the next one


class ReaderPool:
    """A pool of at most `size` daemon threads, started as work comes in; they belong to the node that made the pool.

    One thread at a time has the turn: it reads what has arrived, and runs the tasks that come of it. If several of one
    connection came together and they are quick, it keeps the turn for all of them, which costs no switch between
    threads. Another thread takes the turn from a task that takes longer. With a single task, or slow ones, the turn is
    given up first.

        waiting ──► has the turn ──► waiting              nothing is left to do
           │             └─────────► runs a task          gives the turn up before the task, or loses it meanwhile
           │                            └────► waiting
           └──► watches the turn ──► has the turn         the turn is free, or the task has taken 1 ms
                         └─────────► waiting              nothing is left to do
                (if another thread watches: parks until a thread is needed)

    If all threads run tasks, one more thread reads on, so that credits, cancelled calls and closed connections are
    seen. Tasks must not raise.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._node = current_context()
        self._tasks: deque[_PoolTask] = deque()
        self._sources: deque[Callable[[], None]] = deque()  # reads of connections that are ready
        self._last_read: Callable[[], None] | None = None
        self._lock = threading.Lock()  # for starting threads and for taking the turn
        self._threads: list[threading.Thread] = []
        self._turn = 0  # the ident of the thread that has the turn; 0: it is free
        self._turn_since = 0.0  # when that thread began its task
        self._slow_in_a_row = 0
        self._readers: set[int] = set()  # threads that read
        self._waiters: set[int] = set()  # the threads that wait for work, of those that may run tasks
        self._watcher = 0  # the thread that waits until it may take the turn
        self._is_called = False  # whether a waiting thread was woken to watch
        self._watch = threading.Lock()  # held; released to wake the watcher
        self._watch.acquire()
        self._parked = threading.Semaphore(0)
        self._num_parked = 0
        self._reserve: threading.Thread | None = None
        self._reserve_is_needed = threading.Lock()
        self._alive = 0
        self._needs_more_threads = False
        self._is_closed = False
        self._waiting = _TaskWaiter(size + 1)
        self._unsent: dict[Connection, None] = {}  # connections with replies that wait for the next one
        self._unsent_since = 0.0

    def submit(self, task: Callable[..., Any], *args: Any) -> None:
        self._tasks.append((task, args))
        ident = get_ident()
        if ident in self._readers:
            return  # it checks for tasks afterwards
        if self._turn == ident:
            self._turn = 0  # a handler that calls its own server will wait
        if self._watcher:
            if not self._turn:
                _release(self._watch)
        elif self._waiters:  # whether or not one is called: this code may have interrupted the call
            self._waiting.wake()
        else:
            self._add_reader()

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

    def send(self, connection: Connection, frame: Frame) -> None:
        """Send a reply, as `connection.send`; small ones of quick tasks that follow each other go out together."""
        if not (self._tasks and self._turn == get_ident() and connection.can_send_later):
            connection.send(frame)
            return
        if frame.buffers or len(frame.body) > _SMALL_BYTES:
            connection.send(frame)
            return
        connection.send_later(frame)
        if not self._unsent:
            self._unsent_since = time.monotonic()
        self._unsent[connection] = None

    def close(self) -> None:
        """End every thread after its current task; tasks that are submitted from now on never run."""
        with self._lock:
            self._is_closed = True
            is_empty = not self._alive
            join_at_exit(self._threads)
        if is_empty:
            self._waiting.close()
        self._wake_all()

    def _wake_all(self) -> None:
        self._release_reserve()
        _release(self._watch)
        self._parked.release(self._size + 1)
        self._waiting.wake()

    def _make_sure_of_watcher(self) -> None:
        """Make sure that another thread takes the turn if that is free, or is not given up within 1 ms."""
        if self._watcher:
            return
        if not self._waiters:
            self._add_reader()
        elif not self._is_called:
            self._is_called = True
            self._waiting.wake()

    def _add_reader(self) -> None:
        """Make sure that a thread waits for work."""
        with self._lock:
            if self._num_parked:
                self._num_parked -= 1
                self._parked.release()
                return
            if len(self._threads) < self._size and not self._is_closed:
                thread = self._start(self._work, f"{self._name}-{len(self._threads)}")
                if thread is not None:
                    self._threads.append(thread)
                return
            if self._reserve is None and not self._is_closed:
                self._reserve = self._start(self._work_in_reserve, f"{self._name}-reader")
        self._release_reserve()

    def _release_reserve(self) -> None:
        _release(self._reserve_is_needed)

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
            self._wake_all()  # the next thread ends as well

    def _work(self) -> None:
        """Do what there is to do, then wait for more."""
        ident = get_ident()
        if (self._tasks or self._sources or self._unsent) and self._may_lead(ident):
            self._lead(ident)
        waiters = self._waiters
        waiters.add(ident)
        if (self._tasks or self._sources) and not self._watcher:  # they came before this thread counted as waiting
            waiters.discard(ident)
            return
        source = self._waiting.wait()
        waiters.discard(ident)
        if source is not None:
            self._sources.append(source)
        else:
            self._is_called = False

    def _may_lead(self, ident: int) -> bool:
        """Take the turn, or watch the thread that has it until the turn can be taken; False if that is not needed."""
        while not self._is_closed:
            with self._lock:
                busy_s = time.monotonic() - self._turn_since
                if not self._turn or busy_s >= _TAKEOVER_S:
                    self._turn, self._turn_since = ident, time.monotonic()
                    return True
                if self._watcher:
                    self._num_parked += 1
                else:
                    self._watcher = ident
            if self._watcher != ident:
                self._parked.acquire()
                return False
            self._watch.acquire(timeout=_TAKEOVER_S - busy_s)
            self._watcher = 0
            if not (self._tasks or self._sources or self._unsent):
                return False
        return False

    def _lead(self, ident: int) -> None:
        """Read and run as long as this thread has the turn, and there is something to do."""
        tasks, sources = self._tasks, self._sources
        while self._turn == ident:
            if tasks:
                self._run_next()
            elif sources:
                self._read_next(ident)
            else:
                if self._unsent:
                    self._flush()
                self._turn = 0
                # Anything that came just before is left to this thread, since the turn was not free.
                if (not tasks and not sources) or not self._may_lead(ident):
                    return

    def _read_next(self, ident: int) -> None:
        try:
            read = self._sources.popleft()
        except IndexError:  # a thread that is about to lose the turn was faster
            return
        self._last_read = read
        self._readers.add(ident)
        try:
            read()
        finally:
            self._readers.discard(ident)

    def _run_next(self) -> None:
        try:
            function, args = self._tasks.popleft()
        except IndexError:
            return
        self._turn_since = begin = time.monotonic()
        if self._unsent and (begin - self._unsent_since > _DELAY_S or not (self._waiters or self._watcher)):
            self._flush()
        is_more_at_hand = self._tasks or self._unsent or self._last_read in self._sources
        if is_more_at_hand and self._slow_in_a_row < _SLOW_IN_A_ROW:
            self._make_sure_of_watcher()
        else:
            self._give_up_turn()
        function(*args)
        del function, args  # a waiting thread must not keep the last call's tensors alive
        self._slow_in_a_row = self._slow_in_a_row + 1 if time.monotonic() - begin > _QUICK_S else 0

    def _give_up_turn(self) -> None:
        if self._unsent:
            self._flush()
        self._turn = 0
        is_work_left = bool(self._tasks or self._sources)
        if self._watcher and (is_work_left or not self._waiters):
            _release(self._watch)
        elif is_work_left or not self._waiters:
            self._make_sure_of_watcher()

    def _flush(self) -> None:
        """Send the replies that wait for more."""
        while self._unsent:
            with contextlib.suppress(KeyError, Unavailable):  # another thread was faster, or the caller has gone
                self._unsent.popitem()[0].flush()

    def _work_in_reserve(self) -> None:
        """Read while all other threads run tasks; leave the tasks to them."""
        if self._waiters or self._watcher or self._num_parked or self._is_closed:
            if self._tasks or self._sources:
                self._make_sure_of_watcher()
            self._reserve_is_needed.acquire()
            return
        ident = get_ident()
        if not self._sources:
            source = self._waiting.wait()
            if source is None:
                self._is_called = False
            else:
                self._sources.append(source)
        self._flush()
        while self._sources:
            self._read_next(ident)


def _release(lock: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it is released already
        lock.release()


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
