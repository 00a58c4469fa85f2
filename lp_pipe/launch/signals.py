"""Ctrl+C, SIGTERM and SIGHUP at the launcher: once, an ordered stop; twice, the end at once. Ctrl+Z: all sleep."""

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
_WITH_OTHER_MEANINGS = (signal.SIGHUP, signal.SIGTSTP)  # "read the settings again", an editor's
_NOTICED_WITHIN_S = 0.5


class Terminated(KeyboardInterrupt, SystemExit):
    """SIGTERM or SIGHUP at the launcher: like a Ctrl+C to `except`; a script that lets it pass ends with 143 or 129."""

    def __init__(self, number: int) -> None:
        super().__init__(f"received {signal.Signals(number).name}")
        self.code: int = 128 + number


class Interrupts:
    """What signals do to one run: installed only from the main thread, restored when no run is left.

    A signal raises KeyboardInterrupt in the main thread, wherever it is; `wait()` and the `with` body let it pass on
    once the nodes are down. While the main thread is inside a stop nothing is raised, or the stop would be left
    half done: a first signal is raised after it, a further one calls `hurry`.

    suspend: what Ctrl+Z (SIGTSTP) does before this process is stopped; returns what to do once it goes on (`fg`, `bg`).
        None: it is not to be stopped.
    """

    def __init__(self, hurry: Callable[[], object], suspend: Callable[[], Callable[[], object] | None]) -> None:
        self._hurry = hurry
        self.suspend = suspend
        self._is_deferring = False
        self._deferred: KeyboardInterrupt | None = None
        self.received: int | None = None
        self.is_impatient = False  # a second signal has come, maybe before the stop that the first one asked for

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
        """This run is over. The main thread restores the handlers after the last one; until then they pass on."""
        with contextlib.suppress(ValueError):
            _installed.remove(self)
        if not _installed and threading.current_thread() is threading.main_thread():
            _restore()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep signals out of the body; the first one is raised at its end."""
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
        """Note a signal; True when it is taken care of, and must not be raised where the main thread is.

        A terminal that is closed sends SIGHUP twice, itself and by its shell: further ones mean no haste.
        """
        is_first = self.received is None
        if number == signal.SIGHUP and not is_first:
            return True
        self.received = self.received or number
        self.is_impatient = not is_first
        if self._is_deferring and is_first:
            self._deferred = _exception(number)
        elif self._is_deferring:
            # Not here: the main thread may hold the very lock that this takes.
            threading.Thread(target=self._hurry, name="hurry", daemon=True).start()
        return self._is_deferring


class Latch:
    """Open once and for ever; a signal that raises in the main thread's `wait`, at whatever line, hurts nobody.

    A threading.Event that is interrupted so may keep its lock, and then nobody can set it any more.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def open(self) -> None:
        """Called once."""
        self.is_open = True
        self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is open, at the latest after `timeout` seconds; looks every half a second.

        For a signal that comes while the main thread hands the interpreter's lock over, about to sleep, is only noted;
        then nothing would wake it until the end (CPython 3.11, drop_gil: seen with many nodes that start at Ctrl+C).
        And one that comes while this has the gate leaves it closed to others who wait.
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
        # Not here: the main thread may hold a lock that this takes.
        threading.Thread(target=_suspend, args=(list(_installed),), name="suspend", daemon=True).start()
    elif not any([interrupts.on_signal(number) for interrupts in _installed]):  # a list: every run must hear of it
        raise _exception(number)


def _suspend(runs: list[Interrupts]) -> None:
    if not _suspending.acquire(blocking=False):
        return  # Ctrl+Z, twice
    with contextlib.ExitStack() as stack:
        stack.callback(_suspending.release)
        for interrupts in runs:
            resume = interrupts.suspend()
            if resume is None:
                _log.warning("Ctrl+Z: the program goes on: its hosts would take a launcher that is stopped for dead")
                return
            stack.callback(resume)
        # To this thread, which then executes nothing any more before all threads go on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _exception(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt("received SIGINT") if number == signal.SIGINT else Terminated(number)


def _is_ours_to_take(number: int, before: Any) -> bool:
    """Not what the script ignores (nohup), nor what may have another meaning to it."""
    return before is signal.SIG_DFL if number in _WITH_OTHER_MEANINGS else before is not signal.SIG_IGN


def _restore() -> None:
    for number, before in list(_before.items()):
        if signal.getsignal(number) is _handle:
            signal.signal(number, before)
    _before.clear()  # not before: a signal in between restores them, too


class _Fork(threading.local):
    """A fork in this thread. The runs are the parent's: a child (multiprocessing's) ends at a SIGTERM as ever.

    Signals are held back meanwhile: one that came before the child has its own handlers would be lost.
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
