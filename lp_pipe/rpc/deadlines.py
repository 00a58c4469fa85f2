"""Limits of calls: how long, and one thread per process that acts when they have passed."""

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
    order: int  # of two at the same time, so that actions are never compared
    action: Callable[[], object]
    is_needed: Callable[[], bool]


class Deadlines:
    """Calls `action()` at its time, in one daemon thread that starts with the first deadline."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the child has no such thread; the calls are its parent's

    def _reset(self) -> None:
        self._heap: list[_Deadline] = []
        self._enough = _FEW
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def recover(self) -> None:
        """Give back the lock, where an exception has interrupted the calling thread between two bytecodes."""
        release_if_held_here(self._changed)

    def add(self, when: float, action: Callable[[], object], is_needed: Callable[[], bool] = _always) -> None:
        """Call `action` once time.monotonic() reaches `when`. It must be quick, and harmless if no longer needed.

        is_needed: what is not may be forgotten early, so that an hour of calls does not pile up until their limit.
        """
        with self._changed:
            heapq.heappush(self._heap, _Deadline(when, next(self._order), action, is_needed))
            if len(self._heap) > self._enough:
                self._heap = [deadline for deadline in self._heap if deadline.is_needed()]
                heapq.heapify(self._heap)
                self._enough = max(_FEW, 2 * len(self._heap))
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                thread.start()  # before it counts: the system may have no more
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
    """What a call ends with at its deadline."""
    return DeadlineExceeded(f"{peer}.{method}(): no reply within call_timeout = {call_timeout_s} s")


def seconds(timeout: float | timedelta | None) -> float | None:
    """A call's limit, None for no limit, or one longer than the system can wait; ValueError when it is negative."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, str):
        raise TypeError(f"call_timeout={timeout!r}: a number of seconds (or a timedelta) is needed, not a text")
    if timeout is not None and timeout < 0:
        raise ValueError(f"call_timeout={timeout}: must not be negative; None or 0 means no limit")
    return float(timeout) if timeout and timeout <= _LONGEST_S else None
