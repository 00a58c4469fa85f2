"""The other ways to call a client's methods: `client.futures.method()`, `client.aio.method()`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol

from lp_pipe.rpc.calls import Reply
from lp_pipe.rpc.consuming import RemoteAsyncIterator

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Callee(Protocol):
    """What the views need of a client."""

    def _start(self, method: str, args: Args, kwargs: Kwargs) -> "Future[Any]": ...

    async def _await(self, method: str, args: Args, kwargs: Kwargs) -> Any: ...


class Futures:
    """`client.futures.method(...)`, `client.futures(...)`."""

    def __init__(self, client: Callee) -> None:
        self._client = client

    def __call__(self, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return self._client._start("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., "Future[Any]"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._client._start(name, args, kwargs)


class Aio:
    """`client.aio.method(...)`, `client.aio(...)`."""

    def __init__(self, client: Callee) -> None:
        self._client = client

    def __call__(self, /, *args: Any, **kwargs: Any) -> "AioCall":
        return AioCall(self._client._await("__call__", args, kwargs))

    def __getattr__(self, name: str) -> Callable[..., "AioCall"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: AioCall(self._client._await(name, args, kwargs))


class AioCall(Coroutine[Any, Any, Any]):
    """A call as a coroutine: `await` it for the result, or `async for` over it when the handler is a generator.

    As with every coroutine nothing happens (and no argument is captured) before it is awaited, and it may be handed
    to `asyncio.create_task` or a TaskGroup. Awaiting the call of a generator handler gives its async iterator.
    """

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._call.__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return _Opening(self._call)

    def send(self, value: Any) -> Any:
        return self._call.send(value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._call.throw(kind if value is None else value)

    def close(self) -> None:
        self._call.close()


class _Opening(AsyncIterator[Any]):
    """An iterator whose call is made with the first item that is asked for."""

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

    def deliver(self, reply: Reply) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._settle, reply)

    def cancelled(self) -> bool:
        return self._reply.cancelled()

    def cancel(self) -> None:
        """Give the call up, if it has been sent; else it will not be."""
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
