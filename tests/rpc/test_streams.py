"""Generators in one node, iterated in another: the same in threads and processes, sync and async."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.rpc.stream_producer import MAX_BYTES, MAX_ITEMS

WITHIN_S = 20.0

Serve = Callable[..., lp.CourierClient]


@pytest.fixture
def serve(mode: str) -> Iterator[Serve]:
    """`serve(ctor)` gives a client of a program's only node."""
    with contextlib.ExitStack() as runs:

        def start(ctor: Any, *args: Any, client: Any = None, grace: float = 2.0, **server: Any) -> lp.CourierClient:
            program = lp.Program("serve")
            node = lp.CourierNode(ctor, *args, courier_kwargs=server, courier_client_kwargs=client)
            handle = program.add_node(node, label="server")
            start.run = runs.enter_context(lp.launch(program, mode, grace=grace))  # type: ignore[attr-defined]
            return handle.dereference()

        yield start


class Feeder:
    """Generators that note how far they came and that they were closed."""

    def __init__(self) -> None:
        self._made = self._closed = 0
        self._lock = threading.Lock()
        self._asked = threading.Event()

    def count(self, stop: int | None = None, fail_at: int | None = None) -> Iterator[int]:
        try:
            for i in itertools.count():
                if i == stop:
                    return
                if i == fail_at:
                    raise ValueError(f"no item {i}")
                self._note(made=1)
                yield i
        finally:
            self._note(closed=1)

    async def acount(self, stop: int | None = None, fail_at: int | None = None) -> AsyncIterator[int]:
        try:
            for i in itertools.count():
                if i == stop:
                    return
                if i == fail_at:
                    raise ValueError(f"no item {i}")
                self._note(made=1)
                yield i
        finally:
            self._note(closed=1)

    def made_lazily(self) -> Any:
        return (2 * i for i in range(3))

    def arrays(self, count: int, mib: int) -> Iterator[Any]:
        for i in range(count):
            self._note(made=1)
            yield np.full(mib << 18, i, np.float32)

    def with_a_lock(self) -> Iterator[Any]:
        try:
            yield 1
            yield threading.Lock()
        finally:
            self._note(closed=1)

    def until_asked(self) -> Iterator[bool]:
        yield self._asked.is_set()
        yield self._asked.wait(WITHIN_S)

    def ask(self) -> None:
        self._asked.set()

    def hesitate(self) -> Iterator[int]:
        yield 1
        time.sleep(1.0)
        yield 2

    def die(self) -> Iterator[int]:
        yield 1
        os._exit(3)

    def numbers(self) -> tuple[int, int]:
        return self._made, self._closed

    def _note(self, made: int = 0, closed: int = 0) -> None:
        with self._lock:
            self._made += made
            self._closed += closed


_CONSUME_AND_DIE = """
import os, sys
import lp_pipe as lp
client = lp.CourierClient(sys.argv[1])
streams = [client.count(), client.acount()]
assert [next(items) for items in streams] == [0, 0]
os._exit(5)
"""

EITHER = pytest.mark.parametrize("method", ["count", "acount"])
SIZES = pytest.mark.parametrize("size", [0, 1, 16])


def is_closed(client: lp.CourierClient, count: int = 1) -> bool:
    """Return whether so many generators ran their `finally` in time; ask often, as a long call would block them."""
    deadline = time.monotonic() + WITHIN_S
    while client.numbers()[1] < count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def settled(client: lp.CourierClient) -> int:
    """Return how many items were made, once the generator rests."""
    before = -1
    while (now := client.numbers()[0]) != before:
        before = now
        time.sleep(0.1)
    return before


@SIZES
@EITHER
def test_a_remote_generator_is_iterated(serve: Serve, method: str, size: int) -> None:
    client = serve(Feeder, thread_pool_size=size)
    assert list(getattr(client, method)(100)) == list(range(100))
    assert list(getattr(client, method)(0)) == []
    assert list(getattr(client.futures, method)(stop=3).result(WITHIN_S)) == [0, 1, 2]

    async def main() -> None:
        assert [item async for item in getattr(client.aio, method)(100)] == list(range(100))
        items = await getattr(client.aio, method)(stop=3)
        assert [item async for item in items] == [0, 1, 2]

    asyncio.run(main())
    assert client.numbers()[1] == 5
    assert list(client.made_lazily()) == [0, 2, 4]


@EITHER
def test_the_producer_is_at_most_a_window_ahead(serve: Serve, method: str) -> None:
    client = serve(Feeder)
    items = getattr(client, method)()
    assert settled(client) == MAX_ITEMS
    assert [next(items) for _ in range(40)] == list(range(40))
    assert settled(client) <= 40 + MAX_ITEMS


def test_large_items_make_the_window_smaller(serve: Serve) -> None:
    client = serve(Feeder)
    items = client.arrays(12, mib=4)
    assert settled(client) == MAX_BYTES >> 22
    assert [float(array[-1]) for array in items] == list(range(12))


WAYS = ["close", "drop", "with", "break in a loop", "aclose", "aclosing"]


@pytest.mark.parametrize("size", [0, 1])
def test_who_stops_iterating_closes_the_generator(serve: Serve, size: int) -> None:
    client = serve(Feeder, thread_pool_size=size)
    for stopped, (method, way) in enumerate(itertools.product(["count", "acount"], WAYS), 1):
        stop_iterating(client, method, way)
        assert is_closed(client, stopped), (method, way)


def stop_iterating(client: lp.CourierClient, method: str, way: str) -> None:
    async def in_a_loop() -> None:
        if way == "aclose":
            items = await getattr(client.aio, method)()
            assert await anext(items) == 0
            await items.aclose()
            assert [item async for item in items] == []
        elif way == "aclosing":
            async with contextlib.aclosing(getattr(client.aio, method)()) as items:
                async for item in items:
                    if item == 20:
                        break
                assert await anext(aiter(items)) == 21
        else:
            async for item in getattr(client.aio, method)():
                if item == 20:
                    break

    if way in ("break in a loop", "aclose", "aclosing"):
        asyncio.run(in_a_loop())
    elif way == "with":
        with getattr(client, method)() as items:
            assert next(items) == 0
    else:
        items = getattr(client, method)()
        assert next(items) == 0
        if way == "close":
            items.close()
            assert list(items) == []
        del items


@EITHER
def test_an_exception_arrives_at_its_place(serve: Serve, method: str) -> None:
    client = serve(Feeder)
    items = getattr(client, method)(fail_at=30)
    assert [next(items) for _ in range(30)] == list(range(30))
    with pytest.raises(ValueError, match="no item 30") as caught:
        next(items)
    assert isinstance(caught.value, lp.RemoteError)
    assert "in " + method in caught.value.remote_traceback
    assert list(items) == []  # as with a local generator

    async def main() -> None:
        seen = []
        with pytest.raises(ValueError, match="no item 2"):
            async for item in getattr(client.aio, method)(fail_at=2):
                seen.append(item)
        assert seen == [0, 1]

    asyncio.run(main())


def test_an_item_that_does_not_pickle_ends_the_stream(serve: Serve) -> None:
    client = serve(Feeder)
    items = client.with_a_lock()
    assert next(items) == 1
    with pytest.raises(lp.SerializationError, match=r"with_a_lock\(\).*lock"):
        next(items)
    assert is_closed(client)


def test_many_streams_share_one_thread_with_calls(serve: Serve) -> None:
    client = serve(Feeder, thread_pool_size=1)
    streams = [client.count() for _ in range(20)]  # parked, they occupy nothing
    assert [[next(items) for _ in range(50)] for items in streams] == [list(range(50))] * 20
    done = threading.Event()
    eager = threading.Thread(target=lambda: list(itertools.takewhile(lambda _: not done.is_set(), streams[0])))
    eager.start()  # takes whatever comes; an endless stream must not starve calls
    assert client.numbers()[1] == 0
    done.set()
    eager.join(WITHIN_S)


def test_a_slow_generator_does_not_block_an_inline_server(serve: Serve) -> None:
    client = serve(Feeder, thread_pool_size=0)
    items = client.until_asked()
    assert next(items) is False
    client.ask()
    assert list(items) == [True]


def test_the_call_timeout_holds_for_every_item(serve: Serve) -> None:
    client = serve(Feeder, client={"call_timeout": 0.3})
    items = client.hesitate()
    assert next(items) == 1
    with pytest.raises(lp.DeadlineExceeded, match=r"hesitate\(\)"):
        next(items)
    assert list(items) == []


@EITHER
def test_a_server_that_ends_is_unavailable_at_the_consumer(serve: Serve, method: str) -> None:
    items = getattr(serve(Feeder, grace=0.5), method)()
    assert next(items) == 0
    serve.run.stop()  # type: ignore[attr-defined]
    with pytest.raises(lp.Unavailable):
        for _ in items:
            pass
    assert list(items) == []


def test_a_killed_server_is_unavailable_at_the_consumer(no_leaks: None) -> None:
    program = lp.Program("killed")
    handle = program.add_node(lp.CourierNode(Feeder), label="server")
    run = lp.launch(program, "process")
    items = handle.dereference().die()
    assert next(items) == 1
    with pytest.raises(lp.Unavailable):
        next(items)
    with pytest.raises(lp.NodeError, match="exit code 3"):
        run.wait(WITHIN_S)


def test_a_consumers_death_closes_the_generator(no_leaks: None) -> None:
    program = lp.Program("consumer")
    handle = program.add_node(lp.CourierNode(Feeder), label="server")
    with lp.launch(program, "process", grace=2.0):
        client = handle.dereference()
        consumer = subprocess.run([sys.executable, "-c", _CONSUME_AND_DIE, client.address], timeout=60)
        assert consumer.returncode == 5
        assert is_closed(client, 2)


def test_streams_pass_through_a_node_in_between(serve: Serve, mode: str) -> None:
    class Forwards:
        def __init__(self, feeder: Any) -> None:
            self._feeder = feeder

        def count(self, stop: int) -> Any:
            return self._feeder.count(stop)

        def double(self, stop: int) -> Any:
            return self._feeder.futures.numbers()

    program = lp.Program("forwards")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    middle = program.add_node(lp.CourierNode(Forwards, feeder), label="middle")
    with lp.launch(program, mode):
        client = middle.dereference()
        assert list(client.count(50)) == list(range(50))
        assert client.double(0) == (50, 1)  # a handler may return a Future: its result is the reply


def test_a_cancelled_future_of_a_stream_closes_it(serve: Serve) -> None:
    client = serve(Feeder)
    for _ in range(20):
        future = client.futures.count()
        if future.cancel():
            assert concurrent.futures.wait([future], WITHIN_S).done
        del future
    before = settled(client)
    assert list(client.count(10)) == list(range(10))
    assert settled(client) == before + 10
