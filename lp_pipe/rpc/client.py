"""Call the methods of a server in another node as if it were here (Launchpad's Courier client)."""

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from lp_pipe import connections
from lp_pipe.connections import Connection, frames, spanning
from lp_pipe.connections.shortage import told
from lp_pipe.connections.when_gone import when_gone
from lp_pipe.context import services_for
from lp_pipe.errors import DeadlineExceeded, SerializationError, Unauthenticated, Unavailable
from lp_pipe.rpc import codec, deadlines, remote_error
from lp_pipe.rpc.calls import CallFuture, Cancel, CancellableCall, Reader, Reply
from lp_pipe.rpc.consuming import RemoteIterator, Stream
from lp_pipe.rpc.explain import unpicklable
from lp_pipe.rpc.exposed import LIST_METHODS
from lp_pipe.rpc.first_failure import because_of
from lp_pipe.rpc.futures_view import Futures
from lp_pipe.rpc.link import Link
from lp_pipe.rpc.owner import Owner
from lp_pipe.telemetry import waits

if TYPE_CHECKING:
    from lp_pipe.rpc.aio import Aio

_RECONNECT_PAUSE_S = 0.02
_OUT_OF_REACH_S = 10.0  # longer than a host that is lost is taken for up (host_timeout)


class _Task(NamedTuple):
    """A call that nobody blocks for: what to send, and who gets the reply."""

    method: str
    payload: codec.Payload
    call: CancellableCall
    cancel: Cancel
    deadline: float | None


class CourierClient:
    """`client.method(*args, **kwargs)` calls the server and waits; `client.futures.method(...)` returns a Future.

    `await client.aio.method(...)` is for event loops. A handler that is a generator is iterated as it produces:
    `for item in client.method()`, `async for item in client.aio.method()`.

    address: what another client's `.address` gave; ValueError for anything else.
    call_timeout: seconds (or a timedelta) per call; None or 0: no limit.
    wait_for_ready: wait while nobody is there; False: Unavailable at once.

    Values go by value. A handler's exception arrives as RemoteError that is also an instance of its own class.
    Calls are never sent twice: when the server dies during a call, that call raises Unavailable.
    Any number of threads may share a client.

    Raises (every call): DeadlineExceeded, Unavailable, MethodNotFound, SerializationError, RemoteError.
    """

    def __init__(
        self,
        address: str,
        call_timeout: float | timedelta | None = None,
        wait_for_ready: bool = True,
        *,
        address_id: str | None = None,
        peer: str = "",
    ) -> None:
        if not connections.is_endpoint(address):
            raise ValueError(f"CourierClient({address!r}): not a server's address: take .address of another client")
        self._address = address
        self._call_timeout_s = deadlines.seconds(call_timeout)
        self._wait_for_ready = wait_for_ready
        self._address_id = address_id
        self._peer = peer or address
        self._as_target = waits.Target(address, address_id or "", self._peer)
        self._link: Link | None = None
        self._link_lock = threading.Lock()
        self._owner = Owner()  # of the lock
        self._services = services_for(address_id) if address_id is not None else None

    @property
    def futures(self) -> Futures:
        """The same methods, each returning a concurrent.futures.Future at once."""
        return Futures(self)

    @property
    def aio(self) -> "Aio":
        """The same methods as coroutines, for any event loop; cancelling one cancels an async handler too."""
        from lp_pipe.rpc.aio import Aio  # asyncio is slow to import, and most programs do without

        return Aio(self)

    @property
    def address(self) -> str:
        """An opaque string from which any process of the program's hosts can make a client."""
        return self._address

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Probing (hasattr of dunders, copy, pickle) stays local: names with an underscore are never remote.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} (private names are not remote)")
        # Not kept in __dict__: a client in a reference cycle would hold its connection until the collector comes by.
        return functools.partial(self._method, name)

    def __repr__(self) -> str:
        return f"CourierClient({self._peer})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self._address, self._call_timeout_s, self._wait_for_ready, self._address_id, self._peer)
        return _make_client, options

    def _method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(name, args, kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deadline = self._deadline()
        payload = self._encode(method, args, kwargs)
        link = self._connected(method, deadline)
        with self._explained(method), waits.waiting(waits.CALL, self._as_target, method, deadline is not None):
            reply = link.call(method, payload, deadline)
        if reply is None:
            raise self._too_late(method)
        return self._outcome(method, reply)

    def _start(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], reader: Reader = "anybody"
    ) -> "Future[Any]":
        future = CallFuture(functools.partial(self._outcome, method), self._as_target, method, reader)
        self._begin(method, args, kwargs, future, lambda link, call_id: link.forget(call_id))
        return future

    def _begin(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: CancellableCall, cancel: Cancel
    ) -> None:
        """Send a call without waiting for anything; every error but that of an argument goes to `call`."""
        task = _Task(method, self._encode(method, args, kwargs), call, cancel, self._deadline())
        link = self._link
        if link is not None and link.is_open():
            self._send_task(link, task)
        else:
            # Connecting may take as long as the server takes to come up; the arguments are captured now.
            payload = codec.Payload(task.payload.body, [bytearray(buffer) for buffer in task.payload.buffers])
            arguments = (task._replace(payload=payload),)
            name = f"connect {self._peer}"
            try:
                threading.Thread(target=self._connect_and_send, args=arguments, name=name, daemon=True).start()
            except RuntimeError as error:
                call.deliver(self._no_thread(method, "to connect", error))

    def _connect_and_send(self, task: "_Task") -> None:
        try:
            link = self._connected(task.method, task.deadline)
        except Exception as error:  # belongs to whoever asks for the result
            task.call.deliver(error)
            return
        if task.call.cancelled():
            task.call.deliver(CancelledError())
            return
        if isinstance(task.call, CallFuture):  # somebody may wait for it already, who did not know where to read
            task.call.reader = "thread"
        self._send_task(link, task)

    def _send_task(self, link: Link, task: "_Task") -> None:
        method, call = task.method, task.call
        try:
            with self._explained(method):
                call_id = link.start(method, task.payload, call)
        except (Unavailable, SerializationError) as error:
            call.deliver(error)
            return
        call.sent = link
        call.on_cancel = functools.partial(task.cancel, link, call_id)
        if call.cancelled():  # between the last look and the line above
            call.cancel()
        if task.deadline is not None:  # must not refer to the call: its result would live until the deadline
            expire = functools.partial(self._expire, link, call_id, method)
            try:
                deadlines.shared.add(task.deadline, expire, functools.partial(link.waits_for, call_id))
            except RuntimeError as error:
                link.expire(call_id, self._no_thread(method, "to watch its call_timeout", error))

    def _no_thread(self, method: str, what_for: str, error: RuntimeError) -> Unavailable:
        return Unavailable(f"{self._peer}.{method}(): no thread {what_for}: {told(error)}")

    def _expire(self, link: Link, call_id: int, method: str) -> None:
        link.expire(call_id, self._too_late(method))

    @contextlib.contextmanager
    def _explained(self, method: str) -> Iterator[None]:
        """Errors of sending say which call it was."""
        try:
            yield
        except Unavailable as error:
            raise Unavailable(f"{self._peer}.{method}(): {error}") from error
        except frames.FrameError as error:
            raise SerializationError(f"{self._peer}.{method}(): the arguments are too large: {error}") from error

    def _encode(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> codec.Payload:
        try:
            return codec.encode((args, kwargs))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a __reduce__ that exits is no reason for this node to end as if all was well
            parts = [*((f"args[{index}]", arg) for index, arg in enumerate(args)), *kwargs.items()]
            raise unpicklable(f"{self._peer}.{method}()", parts, error) from error

    def _awaiting(self, method: str) -> waits.awaiting:
        return waits.awaiting(waits.CALL, self._as_target, method, self._call_timeout_s is not None)

    def _stream_options(self, method: str, waiting: type[waits.waiting] = waits.waiting) -> tuple[Any, ...]:
        """What an iterator needs beside its stream; it keeps the client, and so the connection."""
        too_late = functools.partial(self._too_late, method)
        wait = functools.partial(waiting, waits.CALL, self._as_target, method, self._call_timeout_s is not None)
        return functools.partial(self._outcome, method), self._call_timeout_s, too_late, wait

    def _outcome(self, method: str, reply: Reply) -> Any:
        if isinstance(reply, Stream):
            return RemoteIterator(reply, *self._stream_options(method))
        if isinstance(reply, Exception):
            call = f"{self._peer}.{method}(): "
            if isinstance(reply, Unavailable) and not str(reply).startswith(call):  # where it never connected
                raise because_of(self._services, reply, f"{call}{reply}") from reply
            raise reply
        if reply.kind == frames.ERROR:
            error = remote_error.rebuild(reply.body, f"{self._peer}.{method}()")
            if type(error) is Unavailable:  # the node's own, which takes no more calls
                raise because_of(self._services, error, str(error)) from error
            try:
                raise error
            finally:
                error.__context__ = None  # between threads the handler's own, whose text it has
        try:
            return codec.decode(reply.body, reply.buffers)
        except Exception as error:
            raise SerializationError(
                f"{self._peer}.{method}(): the result does not load here: {type(error).__name__}: {error}"
            ) from error

    def _connected(self, method: str, deadline: float | None) -> "Link":
        link = self._link
        if link is not None and link.is_open():
            return link
        with waits.waiting(waits.RESOLVE, self._as_target, method, deadline is not None):
            return self._newly_connected(method, deadline)

    def _newly_connected(self, method: str, deadline: float | None) -> "Link":
        if not self._owner.is_here:  # a thread that was connecting at the fork has the lock in the child for ever
            self._link_lock, self._owner = threading.Lock(), Owner()
        # Somebody may hold the lock for as long as the server takes to come up: that must not outlast our deadline.
        if not self._link_lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise self._too_late(method)
        try:
            if self._link is None or not self._link.is_open():
                self._link = Link(self._connect(method, deadline))
                # Clients come and go (each that travels through a call is a new one); their connections must not stay.
                when_gone(self, self._link.drop)
            return self._link
        finally:
            self._link_lock.release()

    def _connect(self, method: str, deadline: float | None) -> Connection:
        tried_since: dict[str, float] = {}  # by the endpoint that is registered
        while True:
            try:
                return connections.connect(self._address)
            except Unavailable as error:
                if not self._wait_for_ready or isinstance(error, Unauthenticated):
                    raise type(error)(f"{self._peer}.{method}(): {error}") from error
                why = str(error)
            endpoint = self._wait_until_up(method, deadline)
            since = tried_since.setdefault(endpoint, time.monotonic())
            if spanning.is_far(endpoint) and time.monotonic() - since > _OUT_OF_REACH_S:
                # Its host and ours are alive, and know each other's launcher: only the way between the two is missing.
                raise Unavailable(
                    f"{self._peer}.{method}(): it is up, but was out of reach from host {socket.gethostname()} for "
                    f"{_OUT_OF_REACH_S:g} s: {why}"
                )

    def _wait_until_up(self, method: str, deadline: float | None) -> str:
        """The endpoint that the server has registered; "" where nobody can be asked."""
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise self._too_late(method)
        endpoint = ""
        if self._services is not None and self._address_id is not None:
            try:
                endpoint = self._services.resolve(self._address_id).result(remaining)
            except Unavailable as error:
                raise because_of(self._services, error, f"{self._peer}.{method}(): {error}") from error
            except TimeoutError:
                raise self._too_late(method) from None
        # Registered but not reachable (it has just died), or no coordinator to ask: look again in a moment.
        time.sleep(_RECONNECT_PAUSE_S if remaining is None else min(_RECONNECT_PAUSE_S, remaining))
        return endpoint

    def _deadline(self) -> float | None:
        return None if self._call_timeout_s is None else time.monotonic() + self._call_timeout_s

    def _too_late(self, method: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._peer}.{method}(): no reply within call_timeout = {self._call_timeout_s} s")


def list_methods(client: CourierClient) -> list[str]:
    """Sorted names of the server's public methods."""
    names: list[str] = client._call(LIST_METHODS, (), {})
    return names


def _make_client(
    address: str, call_timeout: float | None, wait_for_ready: bool, address_id: str | None, peer: str
) -> CourierClient:
    return CourierClient(address, call_timeout, wait_for_ready, address_id=address_id, peer=peer)
