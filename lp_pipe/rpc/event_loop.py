"""Async handlers: one event loop in a thread of the server's, started with the first call of such a handler.

Imported only then: asyncio takes longer to load than all of lp_pipe's calls.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from lp_pipe.connections.kernel_calls import has_epoll, new_selector
from lp_pipe.context import NodeContext
from lp_pipe.rpc.responder import Responder
from lp_pipe.rpc.stream_producer import StreamWindow


class LoopThread:
    """A thread with an event loop that belongs to `node`."""

    def __init__(self, name: str, node: NodeContext | None) -> None:
        self._name = name
        self._node = node
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop() if has_epoll() else asyncio.SelectorEventLoop(new_selector())
                thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
                # Set even if None: otherwise the thread would belong to the node that happened to bring the first call.
                thread._lp_pipe_context = self._node  # type: ignore[attr-defined]
                thread.start()  # stored after the start: the system may be out of threads
                self._loop = loop
            return self._loop

    def close(self) -> None:
        """Cancel what still runs and end the thread; returns at once."""
        with self._lock:
            self._is_closing = True
            if self._loop is not None:
                _call_soon(self._loop, self._loop.stop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        if self._node is not None:
            self._node.prepare_thread()
        while not self._is_closing:
            # A task that a handler left behind may raise SystemExit, which asyncio lets through.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class LoopCall:
    """A call with an async handler, which runs in the event loop as a task of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, responder: Responder) -> None:
        self._loop = loop
        self._responder = responder
        self._window = StreamWindow()
        self._has_room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._handler: Coroutine[Any, Any, Any] | None = None

    def start(self, result: Coroutine[Any, Any, Any] | AsyncGenerator[Any, None]) -> None:
        """Run the coroutine or generator that the handler returned; any thread."""
        work = self._stream(result) if isinstance(result, AsyncGenerator) else self._reply(result)
        self._handler = result if isinstance(result, Coroutine) else None
        if not _call_soon(self._loop, self._begin, work):
            work.close()
            self._give_up()

    def credit(self, items: int) -> None:
        _call_soon(self._loop, self._taken, items)

    def cancel(self) -> None:
        _call_soon(self._loop, self._cancel)

    # The methods below run in the loop's thread.

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._ended)
        if self._is_cancelled:  # the caller had gone before the task began
            self._task.cancel()

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _taken(self, items: int) -> None:
        self._window.taken(items)
        self._has_room.set()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():  # perhaps before its first step, so that none of the coroutines below could report it
            self._give_up()

    def _give_up(self) -> None:
        if self._handler is not None:
            self._handler.close()  # it may never have begun
        self._responder.cancelled()

    async def _reply(self, result: Coroutine[Any, Any, Any]) -> None:
        try:
            value = await result
        except BaseException as error:  # also SystemExit: a handler's exception goes to its caller only
            if isinstance(error, asyncio.CancelledError) and self._is_cancelled:
                raise
            self._responder.error(error)
        else:
            self._responder.result(value)

    async def _stream(self, items: AsyncGenerator[Any, None]) -> None:
        self._responder.open_stream()
        try:
            async with contextlib.aclosing(items):
                is_pickled = await self._send_all(items)
        except BaseException as error:  # also SystemExit, which goes to the consumer only
            if isinstance(error, asyncio.CancelledError) and self._is_cancelled:
                raise
            self._responder.error(error)
        else:
            if is_pickled:
                self._responder.end_stream()

    async def _send_all(self, items: AsyncGenerator[Any, None]) -> bool:
        async for item in items:
            if not self._responder.item(item, self._window.sent):
                return False
            await asyncio.sleep(0)  # lets other handlers run although the generator never waits
            while not self._window.is_open:
                self._has_room.clear()
                await self._has_room.wait()
        return True


def _call_soon(loop: asyncio.AbstractEventLoop, function: Any, *args: Any) -> bool:
    """Call the function in the loop's thread; False when the loop is closed, because the server has ended."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True
