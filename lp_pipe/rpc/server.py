"""A server for an object's public methods (Launchpad's Courier server)."""

import contextlib
import functools
import inspect
import threading
import time
import types
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from lp_pipe import connections
from lp_pipe.connections import Connection, Frame, PulledConnection, frames, port_tokens, tcp_endpoint
from lp_pipe.connections.kernel_calls import has_epoll
from lp_pipe.context import current_context, entered
from lp_pipe.errors import MethodNotFound, Unavailable
from lp_pipe.protos import frame_pb2
from lp_pipe.rpc import codec, remote_error, served_methods
from lp_pipe.rpc.batching import BatchedHandler
from lp_pipe.rpc.daemon_pool import CallerQueue, DaemonPool
from lp_pipe.rpc.reader_pool import ReaderPool
from lp_pipe.rpc.responder import Responder
from lp_pipe.rpc.shared_reader import SharedReader
from lp_pipe.rpc.stream_consumer import RemoteIterator
from lp_pipe.rpc.stream_producer import InProgress, ThreadStream
from lp_pipe.telemetry import waits

if TYPE_CHECKING:
    from lp_pipe.rpc.event_loop import LoopThread

_STREAM_THREADS = 16  # for the generators of an inline server, started as needed
_CANCEL_SHARE, _CANCEL_AT_MOST_S = 0.2, 0.5  # the part of the grace for calls that are cancelled at its end
_STREAMS = (types.GeneratorType, RemoteIterator)
_ASYNC = (types.CoroutineType, types.AsyncGeneratorType)
# the calls that a server that has lost its state answers
_RESTORING = ("load_state_dict", served_methods.START_WITHOUT_STATE)


class Server:
    """A server that listens at `endpoint` from construction until `close`.

    thread_pool_size: handlers run in exactly this many threads; 0: inline, in the connection's thread (the fastest, for
        handlers that return at once).
    has_shared_reader: of inline handlers: one thread reads all connections from this host, since all handlers return at
        once. Otherwise each connection has a thread, and a handler that waits holds up no other caller.
    name: the node, for messages ("server/0").
    caller_queue: runs the handlers instead of threads of the server's own; `close` runs what is left of them.
    has_lost_state: the target takes part in checkpoints, and the process that had its state has died. Until
        `load_state_dict` has returned (or the caller says that this is the beginning) every other call is a StateLost.

    `async def` handlers run in one event loop, in a thread of its own, and need no thread of the pool. Generators run
    in the pool, item by item as their consumers ask for more; those of an inline server run in a pool beside it,
    because they may take their time. A handler may also return a concurrent.futures.Future: its result is the reply.
    """

    def __init__(
        self,
        target: object,
        endpoint: str,
        *,
        thread_pool_size: int = 16,
        has_shared_reader: bool = False,
        name: str = "",
        caller_queue: CallerQueue | None = None,
        has_lost_state: bool = False,
    ) -> None:
        self._target = target
        self._has_lost_state = has_lost_state
        self._name = name or type(target).__name__
        self._node = current_context()
        self._thread_pool_size = thread_pool_size
        self._caller_queue = caller_queue
        uses_reader_pool = thread_pool_size and has_epoll() and caller_queue is None
        self._reader_pool = ReaderPool(thread_pool_size, f"call {self._name}") if uses_reader_pool else None
        self._pool: ReaderPool | DaemonPool | CallerQueue = (
            self._reader_pool or caller_queue or DaemonPool(thread_pool_size or _STREAM_THREADS, f"call {self._name}")
        )
        is_shared = has_shared_reader and not thread_pool_size and has_epoll()
        self._shared_reader = SharedReader(f"read for {self._name}", self._node) if is_shared else None
        self._send = self._reader_pool.send if self._reader_pool is not None else _send
        self._loop: LoopThread | None = None
        self._is_quick: dict[str, bool] = {}
        # For every connection, the calls that its client can still cancel or give credits to, by id.
        self._connections: dict[Connection, dict[int, InProgress]] = {}
        self._in_progress: set[Responder] = set()
        self._idle = threading.Condition()
        self._count = threading.Lock()
        self._is_closing = self._is_closed = False
        self.calls = 0
        self._wait_target = waits.Target(endpoint, peer=self._name)
        self._listener = connections.listen(endpoint, self._accept)
        self.endpoint = self._listener.endpoint
        self._wait_target = waits.Target(self.endpoint, peer=self._name)
        waits.add_pool(self.endpoint, self._describe_pool)

    def close(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, give those in progress `grace_s` to be answered, then close every connection.

        Async handlers and generators that are left when the grace is nearly over are cancelled, and run their `finally`
        blocks in the rest of it.
        """
        with self._idle:
            self._is_closing = True
        deadline = time.monotonic() + grace_s
        self._listener.close(f"{self._name} ended")
        waits.remove_pool(self.endpoint)
        self._refuse_what_has_not_begun()
        self._wait_until_idle(deadline - min(grace_s * _CANCEL_SHARE, _CANCEL_AT_MOST_S))
        for call in [call for calls in list(self._connections.values()) for call in list(calls.values())]:
            call.cancel()
        self._wait_until_idle(deadline)
        for connection in list(self._connections):
            connection.close(f"{self._name} ended")
        with self._idle:
            self._is_closed = True
            if self._loop is not None:
                self._loop.close()
        self._pool.close()
        if self._shared_reader is not None:
            self._shared_reader.close()

    def _refuse_what_has_not_begun(self) -> None:
        for function, args in self._pool.discard():
            if function == self._handle:
                self._refuse(*args)
            else:
                self._pool.submit(function, *args)  # a stream in progress

    def _serving(self, method: str) -> waits.waiting:
        """Return a context manager that records that the thread runs a handler."""
        return waits.waiting(waits.HANDLER, self._wait_target, method, node=self._node)

    def _describe_pool(self) -> waits.PoolStatus:
        quick = tuple(name for name, is_quick in list(self._is_quick.items()) if is_quick)
        return waits.PoolStatus(self.endpoint, self._thread_pool_size, len(self._in_progress), quick)

    def _wait_until_idle(self, deadline: float) -> None:
        if self._caller_queue is not None:
            self._caller_queue.run_while(lambda: bool(self._in_progress), deadline)
            return
        with self._idle:
            self._idle.wait_for(lambda: not self._in_progress, max(0.0, deadline - time.monotonic()))

    def _accept(self, connection: Connection) -> None:
        self._connections[connection] = {}
        on_frame = functools.partial(self._on_frame, connection)
        if self._reader_pool is not None and isinstance(connection, PulledConnection):
            connection.attach(on_frame, lambda reason: self._on_close(connection))
            self._reader_pool.read(connection)
        elif self._shared_reader is not None and isinstance(connection, PulledConnection) and connection.can_read_once:
            connection.attach(on_frame, lambda reason: self._on_close(connection))
            self._shared_reader.read(connection)
        else:
            connection.start(on_frame, lambda reason: self._on_close(connection))
        if self._is_closing:  # `close` has not seen this connection
            connection.close(f"{self._name} ended")

    def _on_close(self, connection: Connection) -> None:
        if self._reader_pool is not None and isinstance(connection, PulledConnection):
            self._reader_pool.forget(connection)
        elif self._shared_reader is not None and isinstance(connection, PulledConnection):
            self._shared_reader.forget(connection)
        for call in list(self._connections.pop(connection, {}).values()):
            call.cancel()

    def _on_frame(self, connection: Connection, frame: Frame) -> None:
        if frame.kind != frames.CALL:
            self._on_control(connection, frame)
        elif self._is_closing:
            self._refuse(connection, frame)
        elif self._has_lost_state and frame.name not in _RESTORING:
            self._refuse_without_state(connection, frame)
        elif self._thread_pool_size and not self._needs_no_thread(frame.name):
            self._pool.submit(self._handle, connection, frame)
            if self._is_closing:  # the server began to close meanwhile, and `close` may have checked before
                self._refuse_what_has_not_begun()
        elif self._node is not None:
            with entered(self._node):
                self._handle(connection, frame)
        else:
            self._handle(connection, frame)

    def _on_control(self, connection: Connection, frame: Frame) -> None:
        call = self._connections.get(connection, {}).get(frame.id)
        if call is None:
            return  # it has ended, or runs in a thread: that is not interrupted, and the caller has forgotten it
        if frame.kind == frames.STREAM_CREDIT:
            call.credit(frame_pb2.StreamCredit.FromString(bytes(frame.body)).items)
        elif frame.kind == frames.CANCEL:
            call.cancel()

    def _needs_no_thread(self, name: str) -> bool:
        """Return whether calling the method returns at once: it makes a coroutine, or joins a batch."""
        if name not in self._is_quick:
            found = inspect.getattr_static(self._target, name, None)  # runs no code of the user's
            function = getattr(found, "__func__", found)
            if found is None:
                return False  # not cached: callers may ask for any name
            is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
            self._is_quick[name] = is_async or isinstance(found, BatchedHandler)
        return self._is_quick[name]

    def _handle(self, connection: Connection, frame: Frame) -> None:
        responder = Responder(connection, frame, self._name, self._on_end, self._send)
        if self._shared_reader is not None and self._shared_reader.is_this_thread():
            responder.send_later = self._shared_reader.send_later
        self._in_progress.add(responder)
        with self._count:
            self.calls += 1
        if self._has_lost_state:  # the call is one of _RESTORING
            responder.before_result = self._regain_state
            if frame.name == served_methods.START_WITHOUT_STATE:
                return responder.result(True)
        try:
            handler: Any = served_methods.find_method(self._target, self._name, frame.name)
        except MethodNotFound as error:
            return responder.own_error(remote_error.METHOD_NOT_FOUND, str(error))
        except BaseException as error:  # a descriptor or __getattr__ of the user's may raise
            return responder.error(error)
        try:
            args, kwargs = codec.decode(frame.body, frame.buffers)
        except BaseException as error:  # unpickling runs the constructors of the arguments' classes
            why = f"{type(error).__name__}: {remote_error.text_of(error)}"
            text = f"{frame.name}(): {self._name} cannot load the arguments: {why}"
            return responder.own_error(remote_error.SERIALIZATION, text)
        try:
            is_batched = isinstance(handler, BatchedHandler)
            with self._serving(frame.name):
                result = handler.submit(args, kwargs) if is_batched else handler(*args, **kwargs)
        except BaseException as error:  # also SystemExit: a handler's exception goes to its caller only
            return responder.error(error)
        self._reply(responder, result)

    def _reply(self, responder: Responder, result: Any) -> None:
        """Send the result, or arrange that it is sent once it is there."""
        kind = type(result)
        if kind in _STREAMS:
            stream = ThreadStream(result, responder, self._pool.submit, lambda: self._serving(responder.method))
            self._follow(responder, stream)
            stream.start()
        elif kind in _ASYNC:
            self._start_in_loop(responder, result)
        elif isinstance(result, Future):
            result.add_done_callback(functools.partial(self._reply_with, responder))
        else:
            responder.result(result)

    def _start_in_loop(self, responder: Responder, result: Any) -> None:
        from lp_pipe.rpc.event_loop import LoopCall, LoopThread  # asyncio is slow to import

        with self._idle:
            if self._loop is None:
                self._loop = LoopThread(f"async calls {self._name}", self._node)
            if self._is_closed:  # a late call must not leave a thread behind
                self._loop.close()
        call = LoopCall(self._loop.loop, responder)
        self._follow(responder, call)
        call.start(result)

    def _reply_with(self, responder: Responder, done: "Future[Any]") -> None:
        try:
            result = done.result()
        except BaseException as error:  # also the error of a cancelled future
            responder.error(error)
        else:
            self._reply(responder, result)

    def _follow(self, responder: Responder, call: InProgress) -> None:
        """Pass the caller's frames to `call` from now on."""
        self._connections.get(responder.connection, {})[responder.id] = call
        if responder.connection not in self._connections:
            call.cancel()  # the caller has gone

    def _on_end(self, responder: Responder) -> None:
        calls = self._connections.get(responder.connection)
        if calls:
            calls.pop(responder.id, None)
        self._in_progress.discard(responder)
        if self._is_closing:
            with self._idle:
                self._idle.notify_all()

    def _regain_state(self) -> None:
        self._has_lost_state = False

    def _refuse(self, connection: Connection, frame: Frame) -> None:
        text = f"{frame.name}(): {self._name} is stopping and takes no more calls"
        self._send_own_error(connection, frame, remote_error.UNAVAILABLE, text)

    def _refuse_without_state(self, connection: Connection, frame: Frame) -> None:
        text = (
            f"{frame.name}(): {self._name} was restarted and has lost its state: it answers no call before "
            "load_state_dict(), which Checkpoints calls when it goes back to a checkpoint"
        )
        self._send_own_error(connection, frame, remote_error.STATE_LOST, text)

    def _send_own_error(self, connection: Connection, frame: Frame, origin: Any, text: str) -> None:
        with contextlib.suppress(Unavailable):  # the caller has gone
            connection.send(Frame(frames.ERROR, frame.id, body=remote_error.own(origin, text)))


def _send(connection: Connection, frame: Frame) -> None:
    connection.send(frame)


class CourierServer:
    """Serves an object's public methods from construction until `stop`, without a program around it.

    endpoint: "grpc:HOST:PORT", or just "HOST:PORT", on the loopback of this host; port 0: any free one. Clients are
        processes of this user on this host: they find the server's token in a file that only this user can read.
        With "grpc:HOST:PORT#TOKEN" clients are all processes of this host that know the token.
    thread_pool_size: handlers run in so many threads; 0: in the thread that reads the connection.

    Raises:
        ValueError: it is no such endpoint.
        OSError: the port is in use.
    """

    def __init__(self, target: object, endpoint: str = "grpc:127.0.0.1:0", *, thread_pool_size: int = 16) -> None:
        where = tcp_endpoint.parse(tcp_endpoint.as_endpoint(endpoint))
        if where.is_secure:
            raise ValueError(f"CourierServer({endpoint!r}): outside a program only grpc:HOST:PORT can be served")
        token = where.token or port_tokens.new_token()
        self._server = Server(target, where._replace(token=token).with_token, thread_pool_size=thread_pool_size)
        self._where = tcp_endpoint.parse(self._server.endpoint)
        self._published = "" if where.token else token
        if self._published:
            try:
                port_tokens.publish(self._where.port, token)
            except BaseException:
                self._server.close()
                raise

    @property
    def address(self) -> str:
        """The string from which processes of this host make a client: "HOST:PORT", unless it has a token."""
        return self._where.target if self._published else self._where.with_token

    def stop(self, grace: float = 5.0) -> None:
        """Refuse new calls, give those in progress `grace` seconds, and close. Idempotent."""
        if self._published:
            port_tokens.withdraw(self._where.port, self._published)
        self._server.close(grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"CourierServer({self._where})"
