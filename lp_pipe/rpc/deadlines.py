"""The time limits of calls, and one thread per process that acts when they have passed."""

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from lp_pipe.errors import DeadlineExceeded
from lp_pipe.private_python import release_if_held_here
from lp_pipe.rpc import nesting

_FEW = 1024
_LONGEST_S = (2**31 - 1) // 1000  # 24 days: what poll() takes in milliseconds


def _always() -> bool:
    return True


class _Deadline(NamedTuple):
    when: float
    order: int  # orders deadlines of the same time, so that actions are never compared
    action: Callable[[], object]
    is_needed: Callable[[], bool]


class Deadlines:
    """Calls `action()` at its time, in one daemon thread that starts with the first deadline."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the child has no such thread, and the calls are its parent's

    def _reset(self) -> None:
        self._heap: list[_Deadline] = []
        self._enough = _FEW
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def recover(self) -> None:
        """Release the lock if an exception interrupted the calling thread while it held it."""
        release_if_held_here(self._changed)

    def add(self, when: float, action: Callable[[], object], is_needed: Callable[[], bool] = _always) -> None:
        """Call `action` once time.monotonic() reaches `when`. It must be quick, and harmless if no longer needed.

        is_needed: a deadline for which it returns False may be forgotten early, so that an hour of calls does not pile
            up.
        """
        with self._changed:
            heapq.heappush(self._heap, _Deadline(when, next(self._order), action, is_needed))
            if len(self._heap) > self._enough:
                self._heap = [deadline for deadline in self._heap if deadline.is_needed()]
                heapq.heapify(self._heap)
                self._enough = max(_FEW, 2 * len(self._heap))
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                thread.start()  # stored after the start: the system may be out of threads
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        with nesting.in_background():
            while True:
                self._next_action()()

    def _next_action(self) -> Callable[[], object]:
        with self._changed:
            while not self._heap or self._heap[0].when > time.monotonic():
                remaining = self._heap[0].when - time.monotonic() if self._heap else None
                self._changed.wait(None if remaining is None else min(remaining, _LONGEST_S))
            return heapq.heappop(self._heap).action


shared = Deadlines()


def too_late(peer: str, method: str, call_timeout_s: float | None) -> DeadlineExceeded:
    """Return the error with which a call ends at its deadline."""
    return DeadlineExceeded(f"{peer}.{method}(): no reply within call_timeout = {call_timeout_s} s")


def seconds(timeout: float | timedelta | None) -> float | None:
    """Return a call's limit in seconds; None for no limit, or for one longer than the system can wait.

    Raises:
        TypeError: it is a text.
        ValueError: it is negative.
    """
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, str):
        raise TypeError(f"call_timeout must be a number of seconds or a timedelta, got {timeout!r}")
    if timeout is not None and timeout < 0:
        raise ValueError(f"call_timeout must not be negative (None or 0: no limit), got {timeout}")
    return float(timeout) if timeout and timeout <= _LONGEST_S else None
