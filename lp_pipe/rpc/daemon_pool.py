"""A pool of daemon threads: a handler that never returns must not keep the interpreter alive."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

from lp_pipe.context import current_context
from lp_pipe.errors import Unavailable

T = TypeVar("T")

_LOOK_AGAIN_S = 0.02  # how often the condition is checked where there is a deadline

_QueuedTask = tuple[Callable[..., Any], tuple[Any, ...]]


class DaemonPool:
    """A pool of at most `size` threads, started as work comes in; they belong to the node that made the pool.

    Tasks must not raise.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._tasks: SimpleQueue[_QueuedTask | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._is_closed = False
        self._node = current_context()

    def submit(self, task: Callable[..., Any], *args: Any) -> None:
        self._tasks.put((task, args))
        if len(self._threads) < self._size and self._tasks.qsize():
            self._add_thread()

    def start(self, operation: Callable[[], T]) -> "Future[T]":
        """Run the operation in the pool; the Future has its result or error, or Unavailable if the pool is closed."""
        future: Future[T] = Future()
        with self._lock:  # what is submitted before the close will be done
            if not self._is_closed:
                self.submit(settle, future, operation)
                return future
        future.set_exception(Unavailable(f"the pool {self._name!r} takes no more work: its node is ending"))
        return future

    def ensure_thread(self) -> None:
        """Start a thread, so that `submit` only puts into a queue, which is allowed anywhere (if `size` is 1)."""
        if not self._threads:
            self._add_thread()

    def discard(self) -> list[_QueuedTask]:
        """Remove and return the tasks that have not begun."""
        return _taken_from(self._tasks)

    def close(self) -> None:
        """End every thread after its current task; tasks that are submitted from now on never run."""
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._tasks.put(None)
            join_at_exit(self._threads)

    def survive_forks(self) -> Self:
        """Begin with new threads in a forked child; the parent's tasks stay the parent's."""
        os.register_at_fork(after_in_child=lambda: self.__init__(self._size, self._name))  # type: ignore[misc]
        return self

    def is_running_this(self) -> bool:
        """Return whether the calling thread is one of the pool's."""
        return threading.current_thread() in self._threads

    def _add_thread(self) -> None:
        with self._lock:
            if len(self._threads) >= self._size or self._is_closed:
                return
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            # Set even if None: otherwise the thread would belong to the node that happened to bring the first task.
            thread._lp_pipe_context = self._node  # type: ignore[attr-defined]
            try:
                thread.start()
            except RuntimeError:  # the system has no more: the existing threads do the work
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    def _work(self) -> None:
        if self._node is not None:
            self._node.prepare_thread()
        while (task := self._tasks.get()) is not None:
            function, args = task
            function(*args)
            del task, function, args  # a waiting thread must not keep the last call's tensors alive


class CallerQueue:
    """A pool without threads: the one thread that calls `run_while` runs the tasks, in order."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_QueuedTask | None] = SimpleQueue()

    def submit(self, task: Callable[..., Any], *args: Any) -> None:
        self._tasks.put((task, args))

    def wake(self) -> None:
        """Make `run_while` check its condition again; any thread."""
        self._tasks.put(None)

    def run_while(self, condition: Callable[[], bool], deadline: float | None = None) -> None:
        """Run tasks as they come in, as long as the condition holds, or until the deadline (of time.monotonic)."""
        while condition():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return
            try:
                task = self._tasks.get(timeout=None if remaining is None else min(remaining, _LOOK_AGAIN_S))
            except Empty:
                continue
            if task is not None:
                function, args = task
                function(*args)
                del task, function, args  # a waiting thread must not keep the last call's tensors alive

    def discard(self) -> list[_QueuedTask]:
        """Remove and return the tasks that have not begun."""
        return _taken_from(self._tasks)

    def close(self) -> None:
        """Do nothing: the thread that runs tasks has left, so what is submitted from now on never runs."""


def _taken_from(queue: "SimpleQueue[_QueuedTask | None]") -> list[_QueuedTask]:
    tasks: list[_QueuedTask] = []
    while True:
        try:
            task = queue.get_nowait()
        except Empty:
            return tasks
        if task is not None:
            tasks.append(task)


def settle(future: "Future[Any]", operation: Callable[[], Any]) -> None:
    """Run an operation and settle the future with its result or exception."""
    try:
        result = operation()
    except BaseException as error:  # raised in the code that asks for the result
        future.set_exception(error)
    else:
        future.set_result(result)


# A daemon thread does not keep the interpreter alive when its handler never returns. But a daemon that is inside torch
# at the interpreter's exit, freeing the last step's graph for example, ends the process by SIGABRT ("terminate called
# without an active exception"): Python unwinds it through C++ code that forbids that. So the exit waits a moment.
_EXIT_PATIENCE_S = 1.0  # for all threads together

_ending_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def join_at_exit(threads: Iterable[threading.Thread]) -> None:
    """Make the interpreter's exit wait a moment for these threads, which end after their current task."""
    _ending_threads.update(threads)


@atexit.register
def _join_ending_threads() -> None:
    deadline = time.monotonic() + _EXIT_PATIENCE_S
    for thread in list(_ending_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
