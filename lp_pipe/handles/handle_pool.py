"""A client that spreads calls over a group of interchangeable servers."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from lp_pipe.errors import DeadlineExceeded, RemoteError, Unavailable
from lp_pipe.handles.base import Handle
from lp_pipe.rpc import CourierClient
from lp_pipe.rpc.calls import CallFuture, add_quick_callback
from lp_pipe.rpc.futures import Futures
from lp_pipe.rpc.remote_method import RemoteMethod
from lp_pipe.telemetry import waits

_WINDOW = 2  # calls of `map` in flight for each member: one runs, one is on its way
_TRY_AGAIN_S = 1.0  # the pause before a failed member is tried again while others are up
_REACH_S = 0.5
_LOOK_AGAIN_S = 0.1
_FIRST_LOOK_S = 0.2
_LEAST_TRIES = 3

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(init=False, repr=False, eq=False)  # handles in a dataclass are found and dereferenced, as in any other
class Pool:
    """A client for several servers of the same kind: `pool.method(*args)` calls the one with the fewest open calls.

    members: handles, where the pool is an argument of a node; clients, inside a node and in the launcher.
    safe: methods that may run twice. Such a call goes to another member when its own dies during it (then do not change
        its arguments before it has returned); the call of another method raises Unavailable.
    max_pending: the number of calls that each member has open at most; further ones wait.

    A member that cannot be reached gets no calls until it can be. When there is no other, calls wait for the first one
    that comes back, as a client does, unless its wait_for_ready is False. `pool.futures.method(...)` returns a Future;
    both wait while no member may take a call. Any number of threads may share a pool.

    Raises (every call): what a client's call raises.
    """

    _members: tuple[Any, ...]
    _safe: frozenset[str]
    _max_pending: int | None

    def __init__(
        self,
        members: Iterable[Handle[Any] | CourierClient],
        *,
        safe: Iterable[str] = (),
        max_pending: int | None = None,
    ) -> None:
        if isinstance(safe, str):
            raise TypeError(f"Pool: safe must be a list of methods, [{safe!r}], got {safe!r}")
        found = tuple(members)
        for member in found:
            if not isinstance(member, Handle | CourierClient):
                raise TypeError(f"Pool: each member must be a handle or a client of a CourierNode, got {member!r}")
        if not found:
            raise ValueError("Pool: members must have at least one handle or client")
        if max_pending is not None and max_pending < 1:
            raise ValueError(f"Pool: max_pending must be at least 1, or None, got {max_pending}")
        self.__setstate__({"_members": found, "_safe": frozenset(safe), "_max_pending": max_pending})

    def __getstate__(self) -> dict[str, Any]:
        return {"_members": self._members, "_safe": self._safe, "_max_pending": self._max_pending}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._changed = threading.Condition()
        self._member_states: list[_PoolMember] = []  # made with the first call: until then members may be handles
        self._turn = 0

    @property
    def clients(self) -> tuple[CourierClient, ...]:
        """The members' clients, in the order of the members.

        Raises:
            RuntimeError: they are still handles.
        """
        for member in self._members:
            if not isinstance(member, CourierClient):
                raise RuntimeError(
                    f"{self!r} has handles, which are not clients yet: pass it to a node as an argument, or make it of "
                    "clients (run.client(handle))"
                )
        return self._members

    @property
    def futures(self) -> Futures:
        """A view of the same methods, each returning a concurrent.futures.Future."""
        return Futures(self)

    def map(self, method: Any, items: Iterable[Any], *, ordered: bool = False) -> Iterator[Any]:
        """Call the method with each item; yield the results as they arrive, or in the order of the items.

        method: its name, or `pool.method`. Items are taken, and calls made, as results are taken: a few calls for each
            member are open at a time. An exception of a call is raised in its turn; leaving the loop gives the open
            calls up.
        """
        name: str = method if isinstance(method, str) else method.__name__
        window = len(self) * (min(self._max_pending, _WINDOW) if self._max_pending else _WINDOW)
        arrived: SimpleQueue[Future[Any]] = SimpleQueue()
        pending: deque[Future[Any]] = deque()
        try:
            for item in items:
                if len(pending) >= window:
                    yield _next_of(pending, arrived, ordered)
                future = self._start(name, (item,), {}, "thread")
                pending.append(future)
                add_quick_callback(future, arrived.put)
            while pending:
                yield _next_of(pending, arrived, ordered)
        finally:
            for future in pending:
                future.cancel()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", *args, **kwargs)

    def __len__(self) -> int:
        return len(self._members)

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(f"Pool has no attribute {name!r} (private names are not remote)")
        return RemoteMethod(self._call, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not callable(value):
            raise AttributeError(f"cannot set {name!r} of {self!r}: it would change the pool, not the nodes' objects")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"Pool({', '.join(map(repr, self._members))})"

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        for tries in range(1, self._most_tries(name) + 1):
            member = self._take(name)
            try:
                return member.client._call(name, args, kwargs)
            except Unavailable as error:
                if isinstance(error, RemoteError):  # the error of a client that the handler used
                    raise
                self._lose(member)
                if tries == self._most_tries(name):
                    raise
            finally:
                self._give_back(member)

    def _start(self, method: str, args: Args, kwargs: Kwargs, reader: Any = "any") -> "Future[Any]":
        target = waits.Target(peer=repr(self))
        outer = CallFuture(_outcome, target, method, reader)
        self._begin(outer, method, args, kwargs, 1)
        return outer

    def _begin(self, outer: CallFuture, method: str, args: Args, kwargs: Kwargs, tries: int) -> None:
        """Send the call; its outcome, or that of the last try, settles `outer`."""

        def end(inner: "Future[Any]") -> None:
            self._give_back(member)
            if inner.cancelled():
                return
            error = inner.exception()
            is_lost = isinstance(error, Unavailable) and not isinstance(error, RemoteError)
            if is_lost:
                self._lose(member)
            if is_lost and tries < self._most_tries(method) and not outer.cancelled():
                # In a thread of its own: it may wait for a member, which must not happen where replies are read.
                again = (outer, method, args, kwargs, tries + 1)
                threading.Thread(target=self._begin_again, args=again, name=f"again {method}", daemon=True).start()
            else:
                outer.deliver(error if isinstance(error, Exception) else _MemberResult(inner.result()))  # type: ignore[arg-type]

        member = self._take(method)
        try:
            inner = member.client._start(method, args, kwargs, "thread")
        except BaseException:
            self._give_back(member)
            raise
        outer.on_cancel = inner.cancel
        if outer.cancelled():  # cancelled between two tries
            inner.cancel()
        add_quick_callback(inner, end)

    def _begin_again(self, outer: CallFuture, method: str, args: Args, kwargs: Kwargs, tries: int) -> None:
        try:
            if outer.cancelled():
                outer.deliver(CancelledError())
            else:
                self._begin(outer, method, args, kwargs, tries)
        except Exception as error:  # belongs to the code that asks for the result
            outer.deliver(error)

    def _most_tries(self, method: str) -> int:
        return max(_LEAST_TRIES, len(self) + 1) if method in self._safe else 1

    def _take(self, method: str) -> "_PoolMember":
        """Wait for a member that can take the call, and count the call as one of its open ones.

        Raises:
            Unavailable, DeadlineExceeded: no member can be reached.
        """
        timeout_s = self.clients[0]._call_timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if not self._member_states:
                self._member_states = [_PoolMember(client) for client in self.clients]
                self._free_member()  # starts to connect; members that are up take part from the first call on
                self._changed.wait_for(
                    lambda: not any(member.is_connecting for member in self._member_states), _FIRST_LOOK_S
                )
            while True:
                member = self._free_member()
                if member is not None:
                    member.pending += 1
                    self._turn = self._member_states.index(member) + 1
                    return member
                self._wait_for_one(method, deadline)

    def _free_member(self) -> "_PoolMember | None":
        """Return the member with the fewest calls, in turn among equals; try to reach those that are down."""
        for member in self._member_states:
            if member.is_up and not member.is_connected():
                member.is_up = False
            if not member.is_up and not member.is_connecting and time.monotonic() >= member.try_again_at:
                self._connect(member)
        count = len(self._member_states)
        free = [
            (member.pending, (number - self._turn) % count, member)
            for number, member in enumerate(self._member_states)
            if member.is_up and (self._max_pending is None or member.pending < self._max_pending)
        ]
        return min(free, key=lambda one: one[:2])[2] if free else None

    def _wait_for_one(self, method: str, deadline: float | None) -> None:
        errors = [
            member.error
            for member in self._member_states
            if member.error and not (member.is_up or member.is_connecting)
        ]
        if len(errors) == len(self._member_states):
            for member in self._member_states:  # the next call tries again
                member.try_again_at = 0.0
            raise errors[0]
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded(f"{self!r}.{method}(): no member could take the call within its call_timeout")
        with waits.waiting(waits.RESOLVE, self.clients[0]._wait_target, method, deadline is not None):
            self._changed.wait(_LOOK_AGAIN_S if remaining is None else min(remaining, _LOOK_AGAIN_S))

    def _connect(self, member: "_PoolMember") -> None:
        """Connect to the member in a thread, which ends after a while because the pool may not be in use any more."""

        def reach() -> None:
            error, is_up = None, True
            try:
                member.client._reconnector.connected("reach", time.monotonic() + _REACH_S)
            except DeadlineExceeded:  # the member is not up yet
                is_up = False
            except Exception as found:
                error, is_up = found, False
            with self._changed:
                member.is_connecting, member.is_up, member.error = False, is_up, error
                member.try_again_at = time.monotonic() + _TRY_AGAIN_S if error is not None else 0.0
                self._changed.notify_all()

        if member.is_connected():
            member.is_up = True
            return
        member.is_connecting = True
        threading.Thread(target=reach, name=f"reach {member.client!r}", daemon=True).start()

    def _lose(self, member: "_PoolMember") -> None:
        with self._changed:
            member.is_up = False
            member.try_again_at = 0.0
            self._changed.notify_all()

    def _give_back(self, member: "_PoolMember") -> None:
        with self._changed:
            member.pending -= 1
            self._changed.notify_all()


class _PoolMember:
    """A member and what the pool knows of it; used with the pool's lock held."""

    def __init__(self, client: CourierClient) -> None:
        self.client = client
        self.pending = 0
        self.is_up = False
        self.is_connecting = False
        self.try_again_at = 0.0
        self.error: Exception | None = None

    def is_connected(self) -> bool:
        return self.client._reconnector.open_connection() is not None


class _MemberResult:
    """A result of a member, which may be an exception object."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _outcome(reply: Any) -> Any:
    if isinstance(reply, _MemberResult):
        return reply.value
    raise reply


def _next_of(pending: "deque[Future[Any]]", arrived: "SimpleQueue[Future[Any]]", ordered: bool) -> Any:
    if ordered:
        return pending.popleft().result()
    future = arrived.get()
    pending.remove(future)
    return future.result()
