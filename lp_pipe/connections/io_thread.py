"""The thread of a process that waits, for all connections and calls, for times and for peers that have closed.

A connection is read by the thread that waits for its reply (rpc/reply_reader.py). So this one waits for their
ends only, and not for what they bring.
"""

import contextlib
import heapq
import itertools
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from lp_pipe.connections import nesting
from lp_pipe.connections.kernel_calls import has_epoll
from lp_pipe.private_python import release_if_held_here

LONGEST_S = (2**31 - 1) // 1000  # 24 days: what poll() takes in milliseconds
NAME = "ends and timers"
TICKS = 4  # of a silence
_FEW = 1024
_HANGUP_EVENTS = select.EPOLLRDHUP | select.EPOLLONESHOT if hasattr(select, "epoll") else 0


def _always() -> bool:
    return True


class _Timer(NamedTuple):
    when: float
    order: int  # orders timers of the same time, so that actions are never compared
    action: Callable[[], object]
    is_needed: Callable[[], bool]


class IoThread:
    """A daemon thread that starts with the first thing to wait for. What it calls must be quick."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._forked)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._timers: list[_Timer] = []  # a heap
        self._enough = _FEW
        self._order = itertools.count()
        self._watched: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None
        self._poll: select.epoll | select.poll | None = None
        self._wake_ends: tuple[int, ...] = ()  # of a pipe: the one to read, the one to write

    def _forked(self) -> None:
        """Begin anew in a child, which has no such thread, and must not use its parent's epoll."""
        for descriptor in self._wake_ends:
            os.close(descriptor)
        self._reset()

    def recover(self) -> None:
        """Release the lock if an exception interrupted the calling thread while it held it."""
        release_if_held_here(self._lock)

    def at(self, when: float, action: Callable[[], object], is_needed: Callable[[], bool] = _always) -> None:
        """Call `action` once time.monotonic() reaches `when`. It must be harmless if no longer needed.

        is_needed: a timer for which it returns False may be forgotten early, so that an hour of calls does not pile up.

        Raises:
            RuntimeError: the system has no more threads.
        """
        with self._lock:
            timer = _Timer(when, next(self._order), action, is_needed)
            heapq.heappush(self._timers, timer)
            if len(self._timers) > self._enough:
                self._timers = [one for one in self._timers if one.is_needed()]
                heapq.heapify(self._timers)
                self._enough = max(_FEW, 2 * len(self._timers))
            self._start()
            if self._timers and self._timers[0] is timer:
                with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread wakes anyway
                    os.write(self._wake_ends[1], b"\0")

    def watch(self, descriptor: int, on_end: Callable[[], object]) -> None:
        """Call `on_end` once the peer has closed; call `forget` before closing the descriptor. Needs epoll.

        on_end: a bound method, which is not kept alive.

        Raises:
            RuntimeError: the system has no more threads.
        """
        with self._lock:
            poll = self._start()
            self._watched[descriptor] = weakref.WeakMethod(on_end)
            poll.register(descriptor, _HANGUP_EVENTS)

    def watch_again(self, descriptor: int) -> None:
        """Watch again after `on_end` was called for an earlier connection that had this descriptor."""
        with self._lock:
            if descriptor in self._watched and self._poll is not None:
                self._poll.modify(descriptor, _HANGUP_EVENTS)

    def forget(self, descriptor: int) -> None:
        """Stop watching."""
        with self._lock:
            if self._watched.pop(descriptor, None) is not None and self._poll is not None:
                with contextlib.suppress(OSError):  # interrupted code may have stored it and not registered it
                    self._poll.unregister(descriptor)

    def _start(self) -> "select.epoll | select.poll":
        """Make sure that the thread runs, and return what it waits with."""
        if self._poll is None:
            self._wake_ends = os.pipe()
            for descriptor in self._wake_ends:
                os.set_blocking(descriptor, False)
            poll = select.epoll() if has_epoll() else select.poll()
            poll.register(self._wake_ends[0], select.POLLIN)
            self._poll = poll
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, args=(self._poll,), name=NAME, daemon=True)
            thread.start()  # stored after the start: the system may be out of threads
            self._thread = thread
        return self._poll

    def _run(self, poll: "select.epoll | select.poll") -> None:
        scale = 1 if has_epoll() else 1000
        with nesting.in_background():
            while True:
                remaining_s = self._run_timers()
                for descriptor, _ in poll.poll(None if remaining_s is None else remaining_s * scale):
                    self._on_event(descriptor)

    def _run_timers(self) -> float | None:
        """Call what is due, and return the seconds until the next time."""
        while True:
            with self._lock:
                if not self._timers:
                    return None
                remaining_s = self._timers[0].when - time.monotonic()
                if remaining_s > 0:
                    return min(remaining_s, LONGEST_S)
                action = heapq.heappop(self._timers).action
            action()
            del action

    def _on_event(self, descriptor: int) -> None:
        if descriptor == self._wake_ends[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 4096)
            return
        found = self._watched.get(descriptor)
        on_end = found and found()
        if on_end:
            on_end()


shared = IoThread()


class SilenceWatch:
    """Calls `on_silence` once, in a thread, when nothing arrived for `timeout_s` while a thread was waiting to read.

    For carriers that do not limit the time of a read. A silence is a number of ticks, each of which this process must
    live through: one that was frozen or starved for long finds the peer's pings waiting. If the peer was frozen too
    (Slurm's suspend, a paused container), it gets time to speak.
    """

    def __init__(self, timeout_s: float, on_silence: Callable[[], None], name: str) -> None:
        self._pause_s = timeout_s / TICKS
        self._on_silence = on_silence
        self._name = name
        self._is_listening = self._is_over = False
        self._heard = self._silent_ticks = 0
        self._heard_at_tick = -1
        shared.at(time.monotonic() + self._pause_s, self._tick)

    def listening(self) -> None:
        """Count silence from now on."""
        self._is_listening = True

    def heard(self) -> None:
        """Note that something arrived, and stop counting until `listening`."""
        self._is_listening = False
        self._heard += 1

    def end(self) -> None:
        self._is_over = True

    def _tick(self) -> None:
        if self._is_over:
            return
        is_silent = self._is_listening and self._heard == self._heard_at_tick
        self._silent_ticks = self._silent_ticks + 1 if is_silent else 0
        self._heard_at_tick = self._heard
        if self._silent_ticks == TICKS:
            threading.Thread(target=self._on_silence, name=f"silence {self._name}", daemon=True).start()
        else:
            shared.at(time.monotonic() + self._pause_s, self._tick)
