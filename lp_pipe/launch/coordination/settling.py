"""Futures that are settled with a lock held, and get their outcomes without it: their callbacks may want the lock."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple


class Settlement(NamedTuple):
    """A future and its outcome, a value or an error; carried out without any lock, for callbacks run then."""

    future: "Future[Any]"
    outcome: Any

    def carry_out(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(self.outcome, Exception):
            self.future.set_exception(self.outcome)
        else:
            self.future.set_result(self.outcome)


class SettlingLock:
    """The lock of a state for whose changes threads wait, and on whose changes futures depend.

    settled_by_change: called after each change, with the lock held; returns the futures that the change settles.
    """

    def __init__(self, settled_by_change: Callable[[], Iterable[Settlement]]) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self._settled_by_change = settled_by_change
        self._settled: list[Settlement] = []

    def settle(self, settlements: Iterable[Settlement]) -> None:
        """Carry these out after the `changing` block that calls this."""
        self._settled += settlements

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock for a change, wake the threads that wait for one, and settle futures once the lock is free."""
        settled: list[Settlement] = []
        try:
            with self.changed:
                try:
                    yield
                finally:
                    self._settled += self._settled_by_change()
                    self.changed.notify_all()
                    settled, self._settled = self._settled, []
        finally:
            for settlement in settled:
                settlement.carry_out()
