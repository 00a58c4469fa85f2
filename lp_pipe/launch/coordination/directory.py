"""The endpoints of a program's servers, and futures that are settled with a lock held and get outcomes without it."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from lp_pipe.errors import Unavailable


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
    """The lock of a state. Threads wait for its changes, and futures depend on them.

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


class Directory:
    """Endpoints by address id. Not thread-safe: the coordinator holds its lock."""

    def __init__(self) -> None:
        self._endpoints: dict[str, str] = {}
        self._waiting: dict[str, list[Future[str]]] = {}
        self._have_served: set[str] = set()
        self._watched: set[str] = set()  # addresses of servers that hold state of a checkpoint
        self._watchers: list[tuple[frozenset[str], Future[str]]] = []

    def register(self, address: str, endpoint: str) -> list[Settlement]:
        self._endpoints[address] = endpoint
        self._have_served.add(address)
        return [Settlement(future, endpoint) for future in self._waiting.pop(address, [])]

    def withdraw(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._endpoints.pop(address, None)

    def find(self, address: str) -> str | None:
        """Return the endpoint, or None if no server listens there now."""
        return self._endpoints.get(address)

    def wait(self, address: str, future: "Future[str]") -> None:
        """Let `register`, or giving up, settle the future."""
        self._waiting.setdefault(address, []).append(future)

    def give_up(self, addresses: Iterable[str], reason: str) -> list[Settlement]:
        """Return settlements for the futures that wait for these addresses in vain."""
        waiting = [future for address in addresses for future in self._waiting.pop(address, [])]
        return [Settlement(future, Unavailable(reason)) for future in waiting]

    def give_all_up(self, reason: str) -> list[Settlement]:
        return self.give_up(list(self._waiting), reason)

    def watch_state(self, addresses: Iterable[str], loss: "Future[str]") -> None:
        """Note that servers at these addresses hold state of a checkpoint; `lose_state` settles `loss`."""
        watched = frozenset(addresses)
        self._watched |= watched
        self._watchers.append((watched, loss))

    def lose_state(self, addresses: Iterable[str], node: str) -> list[Settlement]:
        """Settle what waits for the death of this node, which listened at the addresses and is to be started again."""
        lost = set(addresses)
        told = [loss for watched, loss in self._watchers if watched & lost]
        self._watchers = [pair for pair in self._watchers if not pair[0] & lost]
        return [Settlement(loss, node) for loss in told]

    def has_lost_state(self, address: str) -> bool:
        """Return whether a server that is about to listen there follows one that held state of a checkpoint."""
        return address in self._watched and address in self._have_served
