"""Calls from event loops, and handlers that run in one: the same in threads and processes."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lp_pipe as lp

WITHIN_S = 20.0


@pytest.fixture
def serve(mode: str) -> Iterator[Callable[..., lp.CourierClient]]:
    """`serve(ctor)` gives a client of a program's only node."""
    with contextlib.ExitStack() as runs:

        def start(ctor: Any, *, grace: float = 5.0, client: Any = None, **server: Any) -> lp.CourierClient:
            program = lp.Program("serve")
            node = lp.CourierNode(ctor, courier_kwargs=server, courier_client_kwargs=client)
            handle = program.add_node(node, label="server")
            run = runs.enter_context(lp.launch(program, mode, grace=grace))
            start.runs.append(run)  # type: ignore[attr-defined]
            return handle.dereference()

        start.runs = []  # type: ignore[attr-defined]
        yield start


Serve = Callable[..., lp.CourierClient]


class Calculator:
    def add(self, a: int, b: int = 10) -> int:
        return a + b

    def __call__(self, x: int) -> int:
        return -x

    def fail(self) -> None:
        raise ValueError("no such layer")

    async def add_slowly(self, a: int, b: int) -> int:
        await asyncio.sleep(0.001)
        return a + b

    async def fail_slowly(self) -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def leave(self) -> None:
        raise SystemExit(3)

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def unpicklable(self) -> Any:
        return threading.Lock()


class Gate:
    """Async handlers that wait until somebody opens."""

    def __init__(self) -> None:
        self._open: asyncio.Event | None = None
        self._entered = 0
        self._cancelled = 0
        self._changed = threading.Condition()

    async def wait(self) -> str:
        if self._open is None:
            self._open = asyncio.Event()
        self._note(entered=1)
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self._note(cancelled=1)
            raise
        return lp.context().name

    async def open(self) -> None:
        assert self._open is not None
        self._open.set()

    def entered(self) -> int:
        return self._entered

    def until(self, entered: int = 0, cancelled: int = 0) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._entered >= entered and self._cancelled >= cancelled, timeout=WITHIN_S
            )

    def _note(self, entered: int = 0, cancelled: int = 0) -> None:
        with self._changed:
            self._entered += entered
            self._cancelled += cancelled
            self._changed.notify_all()


def test_a_call_is_awaited(serve: Serve) -> None:
    client = serve(Calculator)

    async def main() -> None:
        assert await client.aio.add(1, 2) == 3
        assert await client.aio.add(a=1) == 11
        assert await client.aio(5) == -5
        assert await asyncio.gather(*(client.aio.add(i, i) for i in range(50))) == [2 * i for i in range(50)]
        assert await asyncio.create_task(client.aio.add(1, 1)) == 2
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.aio.add(2, 2))
        assert task.result() == 4

    asyncio.run(main())
    asyncio.run(main())  # any loop: also a second one


def test_async_handlers_answer_every_kind_of_call(serve: Serve) -> None:
    client = serve(Calculator)

    async def main() -> None:
        assert await client.aio.add_slowly(1, 2) == 3

    asyncio.run(main())
    assert client.add_slowly(1, 2) == 3
    assert client.futures.add_slowly(1, b=2).result(WITHIN_S) == 3
    assert "add_slowly" in lp.list_methods(client)


def test_errors_arrive_as_they_do_in_other_calls(serve: Serve) -> None:
    client = serve(Calculator)

    async def main() -> None:
        with pytest.raises(ValueError, match="no such layer") as caught:
            await client.aio.fail()
        assert isinstance(caught.value, lp.RemoteError)
        with pytest.raises(KeyError):
            await client.aio.fail_slowly()
        with pytest.raises(lp.MethodNotFound, match="did you mean 'add'"):
            await client.aio.ad(1)
        with pytest.raises(lp.SerializationError, match=r"args\[0\] of type lock"):
            await client.aio.add(threading.Lock())
        with pytest.raises(lp.SerializationError, match=r"unpicklable\(\).*lock"):
            await client.aio.unpicklable()

    asyncio.run(main())
    for method, name in (("leave", "SystemExit"), ("cancel_itself", "CancelledError")):
        with pytest.raises(lp.RemoteError) as caught:
            getattr(client, method)()
        assert caught.value.type_name == name
    assert client.add_slowly(1, 1) == 2  # the loop has outlived it all


@pytest.mark.parametrize("size", [0, 1])
def test_async_handlers_do_not_occupy_the_pool(serve: Serve, size: int) -> None:
    client = serve(Gate, thread_pool_size=size)
    waiting = [client.futures.wait() for _ in range(50)]
    deadline = time.monotonic() + WITHIN_S
    while client.entered() < 50:  # all at once, and other calls get through
        assert time.monotonic() < deadline
    client.open()
    assert {future.result(WITHIN_S) for future in waiting} == {"server/0"}  # their code belongs to the node


def test_async_handlers_run_while_every_thread_of_the_pool_is_taken(serve: Serve) -> None:
    client = serve(Gate, thread_pool_size=1)
    blocked = client.futures.until(entered=1)
    waiting = client.futures.wait()
    assert blocked.result(WITHIN_S)
    client.open()
    waiting.result(WITHIN_S)


def test_cancelling_a_task_cancels_the_async_handler(serve: Serve) -> None:
    client = serve(Gate)

    async def main() -> None:
        task = asyncio.create_task(client.aio.wait())
        assert await client.aio.until(entered=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.aio.until(cancelled=1)

    asyncio.run(main())


def test_a_deadline_passes_in_a_loop_too(serve: Serve) -> None:
    client = serve(Gate, client={"call_timeout": 0.05}, grace=0.1)

    async def main() -> None:
        with pytest.raises(lp.DeadlineExceeded, match=r"wait\(\)"):
            await client.aio.wait()

    asyncio.run(main())


def test_a_server_that_ends_cancels_what_is_left_after_the_grace(serve: Serve) -> None:
    client = serve(Gate, grace=1.0)
    waiting = client.futures.wait()
    assert client.until(entered=1)
    began = time.monotonic()
    serve.runs[0].stop()  # type: ignore[attr-defined]
    with pytest.raises(lp.Unavailable):
        waiting.result(WITHIN_S)
    assert 0.4 < time.monotonic() - began < 5.0


def test_calls_in_progress_are_answered_within_the_grace(serve: Serve) -> None:
    class Leaves:
        async def leave(self) -> str:
            lp.stop()
            await asyncio.sleep(0.1)
            return "answered"

    client = serve(Leaves)
    assert client.leave() == "answered"


def test_a_loop_waits_for_a_server_that_is_not_up_without_blocking(no_leaks: None) -> None:
    async def main() -> None:
        task = asyncio.create_task(lp.CourierClient("inproc:nobody-yet").aio.add(1, 1))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(lp.Unavailable, match="inproc:nobody-yet"):
            await lp.CourierClient("inproc:nobody-yet", wait_for_ready=False).aio.add(1, 1)

    from lp_pipe.rpc import Server

    asyncio.run(main())
    server = Server(Calculator(), "inproc:nobody-yet")  # frees the thread that still tries to connect
    time.sleep(0.1)
    server.close()


def test_a_call_that_is_never_awaited_is_never_sent(serve: Serve) -> None:
    client = serve(Gate)
    client.aio.wait().close()
    assert client.entered() == 0
