"""A client that calls the methods of a server in another node as if it were local (Launchpad's Courier client)."""

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from lp_pipe import connections
from lp_pipe.connections import frames, io_thread, nesting, tcp_endpoint
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.errors import DeadlineExceeded, SerializationError, Unavailable
from lp_pipe.launched import caused_by_first_failure, set_first_failure_as_cause
from lp_pipe.rpc import codec, deadlines, remote_error
from lp_pipe.rpc.calls import CallFuture, Cancel, CancellableCall, Reader, Reply
from lp_pipe.rpc.client_connection import ClientConnection
from lp_pipe.rpc.futures import Futures
from lp_pipe.rpc.pickle_errors import pickle_error
from lp_pipe.rpc.reconnector import Reconnector
from lp_pipe.rpc.remote_method import RemoteMethod
from lp_pipe.rpc.served_methods import LIST_METHODS, START_WITHOUT_STATE
from lp_pipe.rpc.stream_consumer import ItemStream, RemoteIterator
from lp_pipe.telemetry import edges, waits

if TYPE_CHECKING:
    from lp_pipe.rpc.aio import Aio


class _AsyncCall(NamedTuple):
    """A call for which no thread blocks: what to send, and the object that gets the reply."""

    method: str
    payload: codec.Payload
    call: CancellableCall
    cancel: Cancel
    deadline: float | None


class CourierClient:
    """A client of a server: `client.method(*args, **kwargs)` waits, `client.futures.method(...)` returns a Future.

    `await client.aio.method(...)` is for event loops. A handler that is a generator is iterated as it produces:
    `for item in client.method()`, `async for item in client.aio.method()`.

    address: what another client's `.address` gave, or "host:port" of a CourierServer on this host; ValueError for
        anything else.
    call_timeout: seconds (or a timedelta) per call; None or 0: no limit.
    wait_for_ready: wait while the server is not up; False: Unavailable at once.

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
            address = _plain_endpoint(address)
        self._address = address
        self._call_timeout_s = deadlines.seconds(call_timeout)
        self._wait_for_ready = wait_for_ready
        self._address_id = address_id
        self._peer = peer or address
        self._reconnector = Reconnector(address, self._call_timeout_s, wait_for_ready, address_id, self._peer)
        self._wait_target = self._reconnector.target
        self._edge = edges.counter_to(peer, address_id or "")

    @property
    def futures(self) -> Futures:
        """A view of the same methods, each returning a concurrent.futures.Future at once."""
        return Futures(self)

    @property
    def aio(self) -> "Aio":
        """A view of the same methods as coroutines, for any event loop; cancelling one cancels an async handler too."""
        from lp_pipe.rpc.aio import Aio  # asyncio is slow to import, and most programs do not need it

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
        # Not kept in __dict__: a client in a reference cycle would hold its connection until the garbage collector
        # runs.
        return RemoteMethod(self._method, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not callable(value):  # a callable is a stand-in for a method, as tests set one
            raise AttributeError(
                f"{self!r} cannot set {name!r}: it would change this client, and not the node's object. Give its class "
                f"a method for that, such as `def set_{name}(self, value)`, and call it"
            )
        super().__setattr__(name, value)

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
        self._count(payload)
        depths, thread = nesting.depths, get_ident()
        depth = depths.get(thread, 0)
        try:
            try:
                depths[thread] = depth + 1
                reconnector = self._reconnector.at_depth(depth) if depth else self._reconnector
                connection = reconnector.open_connection() or reconnector.connected(method, deadline)
                reply = self._round_trip(connection, method, payload, deadline)
            finally:
                depths[thread] = depth
        except BaseException:
            self._recover(depth)
            raise
        if reply is None:
            raise self._too_late(method)
        return self._outcome(method, reply)

    def _round_trip(
        self, connection: ClientConnection, method: str, payload: codec.Payload, deadline: float | None
    ) -> Reply | None:
        try:
            with waits.waiting(waits.CALL, self._wait_target, method, deadline is not None):
                return connection.call(method, payload, deadline)
        except (Unavailable, frames.FrameError) as error:
            raise self._error_of_sending(method, error) from error

    def _recover(self, depth: int) -> None:
        """Clean up after any exception: a signal handler may have raised it at any point of a call."""
        nesting.depths[get_ident()] = depth
        self._reconnector.at_depth(depth).recover()

    def _start(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], reader: Reader = "any"
    ) -> "Future[Any]":
        future = CallFuture(functools.partial(self._outcome, method), self._wait_target, method, reader)
        self._begin(method, args, kwargs, future, lambda connection, call_id: connection.forget(call_id))
        return future

    def _begin(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: CancellableCall, cancel: Cancel
    ) -> None:
        """Send a call without waiting for anything; every error except those of arguments goes to `call`."""
        task = _AsyncCall(method, self._encode(method, args, kwargs), call, cancel, self._deadline())
        self._count(task.payload)
        depths, thread = nesting.depths, get_ident()
        depth = depths.get(thread, 0)
        try:
            try:
                depths[thread] = depth + 1
                reconnector = self._reconnector.at_depth(depth) if depth else self._reconnector
                connection = reconnector.open_connection()
                if connection is not None:
                    self._send_task(connection, task)
                else:
                    self._connect_in_thread(reconnector, task)
            finally:
                depths[thread] = depth
        except BaseException:
            self._recover(depth)
            raise

    def _connect_in_thread(self, reconnector: Reconnector, task: "_AsyncCall") -> None:
        # Connecting may take as long as the server takes to come up, so the arguments are captured now.
        arguments = (reconnector, task._replace(payload=task.payload.captured()))
        name = f"connect {self._peer}"
        try:
            threading.Thread(target=self._connect_and_send, args=arguments, name=name, daemon=True).start()
        except RuntimeError as error:
            task.call.deliver(self._no_thread(task.method, "to connect", error))

    def _connect_and_send(self, reconnector: Reconnector, task: "_AsyncCall") -> None:
        try:
            connection = reconnector.connected(task.method, task.deadline)
        except Exception as error:  # belongs to the code that asks for the result
            task.call.deliver(error)
            return
        if task.call.cancelled():
            task.call.deliver(CancelledError())
            return
        if isinstance(task.call, CallFuture):  # a thread may wait for it already, without knowing where to read
            task.call.reader = "thread"
        self._send_task(connection, task)

    def _send_task(self, connection: ClientConnection, task: "_AsyncCall") -> None:
        method, call = task.method, task.call
        try:
            call_id = connection.start(method, task.payload, call)
        except (Unavailable, frames.FrameError) as error:
            explanation = self._error_of_sending(method, error)
            explanation.__cause__ = error
            call.deliver(explanation)
            return
        call.sent = connection
        call.on_cancel = functools.partial(task.cancel, connection, call_id)
        if call.cancelled():  # cancelled between the last check and the line above
            call.cancel()
        if task.deadline is not None:  # must not refer to the call: its result would live until the deadline
            expire = functools.partial(self._expire, connection, call_id, method)
            try:
                io_thread.shared.at(task.deadline, expire, functools.partial(connection.waits_for, call_id))
            except RuntimeError as error:
                connection.expire(call_id, self._no_thread(method, "to watch its call_timeout", error))

    def _no_thread(self, method: str, what_for: str, error: RuntimeError) -> Unavailable:
        return Unavailable(f"{self._peer}.{method}(): no thread {what_for}: {describe_error(error)}")

    def _expire(self, connection: ClientConnection, call_id: int, method: str) -> None:
        connection.expire(call_id, self._too_late(method))

    def _error_of_sending(self, method: str, error: Unavailable | frames.FrameError) -> Exception:
        """Return the error that says which call could not be sent, and why."""
        if isinstance(error, Unavailable):
            return caused_by_first_failure(self._reconnector.services, error, f"{self._peer}.{method}(): {error}")
        return SerializationError(f"{self._peer}.{method}(): the arguments are too large: {error}")

    def _count(self, payload: codec.Payload) -> None:
        edge = self._edge
        edge.number += 1
        edge.bytes_sent += len(payload.body) if not payload.buffers else payload.size_bytes

    def _encode(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> codec.Payload:
        try:
            return codec.encode((args, kwargs), is_same_process=self._is_same_process)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # even a __reduce__ that exits, which must not end this node with success
            if _works(codec.encode, (args, kwargs)):
                raise  # it came from a signal handler that ran meanwhile
            parts = [*((f"args[{index}]", arg) for index, arg in enumerate(args)), *kwargs.items()]
            why = pickle_error(f"{self._peer}.{method}()", parts, error, is_same_process=self._is_same_process)
            raise why from error

    def _is_same_process(self) -> bool:
        return connections.is_here(self._address)

    def _awaiting(self, method: str) -> waits.awaiting:
        return waits.awaiting(waits.CALL, self._wait_target, method, self._call_timeout_s is not None)

    def _stream_options(self, method: str, waiting: type[waits.waiting] = waits.waiting) -> tuple[Any, ...]:
        """Return what an iterator needs beside its stream; it keeps the client alive, and so the connection."""
        too_late = functools.partial(self._too_late, method)
        wait = functools.partial(waiting, waits.CALL, self._wait_target, method, self._call_timeout_s is not None)
        return functools.partial(self._outcome, method), self._call_timeout_s, too_late, wait

    def _outcome(self, method: str, reply: Reply) -> Any:
        if isinstance(reply, ItemStream):
            return RemoteIterator(reply, *self._stream_options(method))
        if isinstance(reply, Exception):
            call = f"{self._peer}.{method}(): "
            # already explained where connecting failed
            if isinstance(reply, Unavailable) and not str(reply).startswith(call):
                raise caused_by_first_failure(self._reconnector.services, reply, f"{call}{reply}") from reply
            raise reply
        if reply.kind == frames.ERROR:
            error = remote_error.rebuild(reply.body, f"{self._peer}.{method}()")
            if type(error) is Unavailable:  # the node's own error: it takes no more calls
                raise caused_by_first_failure(self._reconnector.services, error, str(error)) from error
            if isinstance(error, Unavailable):  # the error of a client that the handler used
                set_first_failure_as_cause(self._reconnector.services, error)
            try:
                raise error
            finally:
                error.__context__ = None  # within one process it is the handler's own context; the error has its text
        try:
            return codec.decode(reply.body, reply.buffers)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as in `_encode`
            if _works(codec.decode, reply.body, reply.buffers):
                raise
            raise SerializationError(
                f"{self._peer}.{method}(): the result does not load here: {type(error).__name__}: {error}"
            ) from error

    def _deadline(self) -> float | None:
        return None if self._call_timeout_s is None else time.monotonic() + self._call_timeout_s

    def _too_late(self, method: str) -> DeadlineExceeded:
        return deadlines.too_late(self._peer, method, self._call_timeout_s)


def _plain_endpoint(address: object) -> str:
    """Return the endpoint of "host:port".

    Raises:
        ValueError: it is something else, or another host, to which an unencrypted connection is refused.
    """
    endpoint = tcp_endpoint.as_endpoint(address) if isinstance(address, str) else address
    if not isinstance(endpoint, str) or endpoint == address:
        raise ValueError(f"CourierClient({address!r}): this is no server's address: use .address of another client")
    return str(tcp_endpoint.parse(endpoint))


def list_methods(client: CourierClient) -> list[str]:
    """Return the sorted names of the server's public methods."""
    names: list[str] = client._call(LIST_METHODS, (), {})
    return names


def _works(function: Callable[..., object], *args: Any) -> bool:
    try:
        function(*args)
    except BaseException:
        return False
    return True


def address_of(client: CourierClient) -> str | None:
    """Return the id of the program's address that the client calls; None for a client made from an endpoint."""
    return client._address_id


def start_without_state(client: CourierClient) -> bool:
    """Let a server that has lost its state serve its initial one; return whether it had lost its state."""
    had_lost_state: bool = client._call(START_WITHOUT_STATE, (), {})
    return had_lost_state


def _make_client(
    address: str, call_timeout: float | None, wait_for_ready: bool, address_id: str | None, peer: str
) -> CourierClient:
    return CourierClient(address, call_timeout, wait_for_ready, address_id=address_id, peer=peer)
