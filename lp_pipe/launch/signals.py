"""Signals at the launcher: a first Ctrl+C, SIGTERM or SIGHUP stops in order, a second at once. Ctrl+Z suspends all."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
_WITH_OTHER_MEANINGS = (signal.SIGHUP, signal.SIGTSTP)  # scripts may use these for a reload, or as an editor does
_NOTICED_WITHIN_S = 0.5


class Terminated(KeyboardInterrupt, SystemExit):
    """SIGTERM or SIGHUP at the launcher. `except` treats it like Ctrl+C; uncaught, the script exits with 143 or 129."""

    def __init__(self, number: int) -> None:
        super().__init__(f"received {signal.Signals(number).name}")
        self.code: int = 128 + number


class Interrupts:
    """Signal handling of one run. It is installed only from the main thread, and undone when no run is left.

    A signal raises KeyboardInterrupt in the main thread, wherever that is. `wait()` and the `with` body raise it once
    the nodes are down. While the main thread is inside a stop nothing is raised, because that would leave the stop half
    done: the first signal is raised after the stop, and a further one calls `hurry`.

    suspend: called at Ctrl+Z (SIGTSTP), before this process is stopped. Returns what to call when it goes on (`fg`,
        `bg`), or None if this process must not be stopped.
    """

    def __init__(self, hurry: Callable[[], object], suspend: Callable[[], Callable[[], object] | None]) -> None:
        self._hurry = hurry
        self.suspend = suspend
        self._is_deferring = False
        self._deferred: KeyboardInterrupt | None = None
        self.received: int | None = None
        self.is_impatient = False  # whether a second signal has come, maybe before the stop of the first one began

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is not _handle and _is_ours_to_take(number, before):
                _before[number] = before
                signal.signal(number, _handle)
        _installed.append(self)

    def uninstall(self) -> None:
        """End signal handling for this run. After the last run the main thread restores the previous handlers."""
        with contextlib.suppress(ValueError):
            _installed.remove(self)
        if not _installed and threading.current_thread() is threading.main_thread():
            _restore()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals while the body runs; the first one is raised at its end."""
        if threading.current_thread() is not threading.main_thread() or self._is_deferring:
            yield
            return
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            raise error

    def on_signal(self, number: int) -> bool:
        """Record a signal. True if it is deferred or ignored, and must not be raised in the main thread now.

        Repeated SIGHUPs are ignored: a closed terminal sends two, its own and its shell's.
        """
        is_first = self.received is None
        if number == signal.SIGHUP and not is_first:
            return True
        self.received = self.received or number
        self.is_impatient = not is_first
        if self._is_deferring and is_first:
            self._deferred = _exception(number)
        elif self._is_deferring:
            # In a thread, because this handler may interrupt the main thread while it holds the lock that this takes.
            threading.Thread(target=self._hurry, name="hurry", daemon=True).start()
        return self._is_deferring


class Latch:
    """An event that can be set only once, and that stays usable after a signal handler raises in `wait`, at any line.

    A threading.Event may then stay locked, so that no thread can set it any more.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def open(self) -> None:
        """Open the latch. Must be called only once."""
        self.is_open = True
        self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it is open, at the latest after `timeout` seconds. Checks every half a second.

        A signal that arrives while the main thread gives up the interpreter's lock to sleep is only recorded, and would
        not wake the thread (CPython 3.11, drop_gil: seen with many nodes that start at Ctrl+C). And a signal that
        raises while this method holds the gate leaves it closed for other waiting threads.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_open:
            remaining = _NOTICED_WITHIN_S if deadline is None else min(_NOTICED_WITHIN_S, deadline - time.monotonic())
            if remaining <= 0:
                return False
            if self._gate.acquire(timeout=remaining):
                self._gate.release()
        return True


_installed: list[Interrupts] = []
_before: dict[signal.Signals, Any] = {}
_suspending = threading.Lock()


def _handle(number: int, frame: FrameType | None) -> None:
    if not _installed:
        before = _before.get(signal.Signals(number))
        _restore()
        if callable(before):
            before(number, frame)
        else:
            signal.raise_signal(number)
    elif number == signal.SIGTSTP:
        # In a thread, because the interrupted main thread may hold a lock that this takes.
        threading.Thread(target=_suspend, args=(list(_installed),), name="suspend", daemon=True).start()
    elif not any(
        [interrupts.on_signal(number) for interrupts in _installed]
    ):  # a list, not a generator: every run must get the signal
        raise _exception(number)


def _suspend(runs: list[Interrupts]) -> None:
    if not _suspending.acquire(blocking=False):
        return  # a second Ctrl+Z
    with contextlib.ExitStack() as stack:
        stack.callback(_suspending.release)
        for interrupts in runs:
            resume = interrupts.suspend()
            if resume is None:
                _log.warning(
                    "Ctrl+Z is ignored: the agents of this program's hosts would take a stopped launcher for dead"
                )
                return
            stack.callback(resume)
        # Sent to this thread, so that it executes nothing more until the process goes on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _exception(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt("received SIGINT") if number == signal.SIGINT else Terminated(number)


def _is_ours_to_take(number: int, before: Any) -> bool:
    """Return whether to handle this signal: not if the script ignores it (nohup) or may use it for something else."""
    return before is signal.SIG_DFL if number in _WITH_OTHER_MEANINGS else before is not signal.SIG_IGN


def _restore() -> None:
    for number, before in list(_before.items()):
        if signal.getsignal(number) is _handle:
            signal.signal(number, before)
    _before.clear()  # last, because a signal in between calls this function, too


class _Fork(threading.local):
    """Restores the previous handlers in a forked child, so that SIGTERM ends a child of multiprocessing as usual.

    Signals are blocked during the fork, because one that came before the child's handlers are restored would be lost.
    """

    mask: set[int] | None = None

    def begins(self) -> None:
        if _installed:
            self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def ends(self) -> None:
        if self.mask is not None:
            mask, self.mask = self.mask, None
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def ends_in_child(self) -> None:
        _installed.clear()
        _restore()
        self.ends()


_fork = _Fork()
os.register_at_fork(before=_fork.begins, after_in_parent=_fork.ends, after_in_child=_fork.ends_in_child)
