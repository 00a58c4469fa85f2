"""`client.aio.method()`: calls and streams for event loops.

Imported on first use only: asyncio takes longer to load than all of lp_pipe's calls.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from queue import Empty
from types import TracebackType
from typing import Any, Protocol, Self

from lp_pipe.connections import Frame
from lp_pipe.rpc.calls import Cancel, CancellableCall, Reply, Sent
from lp_pipe.rpc.remote_method import RemoteMethod
from lp_pipe.rpc.stream_consumer import ItemStream, RemoteItems
from lp_pipe.telemetry import waits

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class AioClient(Protocol):
    """The part of a client that this module needs."""

    def _begin(self, method: str, args: Args, kwargs: Kwargs, call: CancellableCall, cancel: Cancel) -> None: ...

    def _outcome(self, method: str, reply: Reply) -> Any: ...

    def _awaiting(self, method: str) -> waits.awaiting: ...

    def _stream_options(self, method: str, waiting: type[waits.waiting]) -> tuple[Any, ...]: ...


class Aio:
    """The view behind `client.aio.method(...)` and `client.aio(...)`."""

    def __init__(self, client: AioClient) -> None:
        self._client = client

    def __call__(self, /, *args: Any, **kwargs: Any) -> "AioCall":
        return AioCall(_call(self._client, "__call__", args, kwargs))

    def __getattr__(self, name: str) -> Callable[..., "AioCall"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteMethod(self._start, name)

    def __repr__(self) -> str:
        return f"{self._client!r}.aio"

    def _start(self, name: str, /, *args: Any, **kwargs: Any) -> "AioCall":
        return AioCall(_call(self._client, name, args, kwargs))


class AioCall(Coroutine[Any, Any, Any]):
    """A call as a coroutine: `await` it for the result, or `async for` over it when the handler is a generator.

    As with every coroutine, nothing happens (and no argument is captured) before it is awaited, and it may be given to
    `asyncio.create_task` or a TaskGroup. Awaiting the call of a generator handler returns its async iterator.
    """

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._call = call
        self._items = _Opening(call)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._call.__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    async def aclose(self) -> None:
        """Close the generator on the server; `contextlib.aclosing` calls this after its body."""
        await self._items.aclose()

    def send(self, value: Any) -> Any:
        return self._call.send(value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._call.throw(kind if value is None else value)

    def close(self) -> None:
        self._call.close()


class _Opening(AsyncIterator[Any]):
    """An iterator that makes its call when the first item is requested."""

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._call = call
        self._items: RemoteAsyncIterator | None = None

    async def __anext__(self) -> Any:
        if self._items is None:
            result = await self._call
            if not isinstance(result, RemoteAsyncIterator):
                raise TypeError(f"`async for` needs a handler that is a generator; this one returned {result!r}")
            self._items = result
        return await self._items.__anext__()

    async def aclose(self) -> None:
        """Close the generator on the server."""
        if self._items is not None:
            await self._items.aclose()
        self._call.close()


class AioReply:
    """A reply that a task of the running event loop waits for; cancelling the task cancels the call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply: asyncio.Future[Reply] = self._loop.create_future()
        self.on_cancel: Callable[[], bool] | None = None
        self.sent: Sent | None = None

    @property
    def has_reply(self) -> bool:
        return self._reply.done()

    def deliver(self, reply: Reply) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._settle, reply)

    def cancelled(self) -> bool:
        return self._reply.cancelled()

    def cancel(self) -> None:
        """Give the call up. If it has not been sent yet, it never is."""
        self._reply.cancel()
        if self.on_cancel is not None:
            self.on_cancel()

    async def wait(self) -> Reply:
        try:
            return await self._reply
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _settle(self, reply: Reply) -> None:
        if not self._reply.done():
            self._reply.set_result(reply)


class RemoteAsyncIterator(RemoteItems, AsyncIterator[Any]):
    """The async iterator over a stream; it belongs to the event loop that made the call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arrival = asyncio.Event()
        loop, arrival = asyncio.get_running_loop(), self._arrival
        self._stream.inbox.on_arrival = lambda: _wake(loop, arrival)

    async def __anext__(self) -> Any:
        self._stream.check_owner()
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._waiting():
                    reply = await self._next_reply()
        except TimeoutError:
            self._stream.close()
            raise self._too_late() from None
        return self._value(reply, StopAsyncIteration)

    async def aclose(self) -> None:
        """Close the generator on the server; iterating on ends at once."""
        self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _next_reply(self) -> Frame | Exception:
        while True:
            self._arrival.clear()  # cleared before the check, so that a later arrival is not missed
            with contextlib.suppress(Empty):
                return self._stream.inbox.take(0)
            await self._arrival.wait()


async def _call(client: AioClient, method: str, args: Args, kwargs: Kwargs) -> Any:
    call = AioReply()
    client._begin(method, args, kwargs, call, lambda connection, call_id: connection.cancel(call_id))
    with client._awaiting(method):
        reply = await call.wait()
    if isinstance(reply, ItemStream):
        return RemoteAsyncIterator(reply, *client._stream_options(method, waits.awaiting))
    return client._outcome(method, reply)


def _wake(loop: asyncio.AbstractEventLoop, arrival: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
        loop.call_soon_threadsafe(arrival.set)
