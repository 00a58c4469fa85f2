"""A server that was started again without its state: it answers nothing before that has been loaded."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.rpc import Server
from lp_pipe.rpc.client import start_without_state

pytestmark = pytest.mark.usefixtures("no_leaks")


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    async def add_later(self, number: int) -> int:
        return self.add(number)

    def count(self) -> Iterator[int]:
        yield from range(self.total)

    def state_dict(self) -> int:
        return self.total

    def load_state_dict(self, state: int) -> None:
        if state < 0:
            raise ValueError(state)
        self.total = state


class AsyncCounter(Counter):
    async def load_state_dict(self, state: int) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.total = state


@pytest.fixture(params=[("inproc", 16), ("unix", 16), ("unix", 0)], ids=str)
def place(request: pytest.FixtureRequest, socket_home: Path) -> tuple[str, int]:
    carrier, threads = request.param
    return f"{carrier}:{socket_home}/server", threads


def serving(target: Any, place: tuple[str, int], *, has_lost_state: bool = True) -> Server:
    endpoint, threads = place
    return Server(target, endpoint, thread_pool_size=threads, name="counter/0", has_lost_state=has_lost_state)


def test_nothing_is_answered_before_the_state_was_loaded(place: tuple[str, int]) -> None:
    counter = Counter()
    server = serving(counter, place)
    client, other = lp.CourierClient(server.endpoint), lp.CourierClient(server.endpoint)
    for call in (lambda: client.add(1), other.state_dict, lambda: client.add_later(1), client.count, client.unknown):
        with pytest.raises(lp.StateLost, match="counter/0") as caught:
            call()
        assert isinstance(caught.value, lp.Unavailable) and not isinstance(caught.value, lp.RemoteError)
    with pytest.raises(lp.StateLost):
        client.futures.add(1).result()
    assert counter.total == 0

    client.load_state_dict(5)
    assert (client.add(1), other.add(1), list(client.count()), other.state_dict()) == (6, 7, [*range(7)], 7)
    server.close()


def test_a_state_that_could_not_be_loaded_is_still_lost(place: tuple[str, int]) -> None:
    server = serving(Counter(), place)
    client = lp.CourierClient(server.endpoint)
    with pytest.raises(ValueError, match="-1"):
        client.load_state_dict(-1)
    with pytest.raises(lp.StateLost):
        client.add(1)
    client.load_state_dict(2)
    assert client.add(1) == 3
    server.close()


def test_nothing_is_answered_while_the_state_is_being_loaded(place: tuple[str, int]) -> None:
    if not place[1]:
        pytest.skip("the one thread of the connection loads")
    is_loading, may_load = threading.Event(), threading.Event()

    class Slow(Counter):
        def load_state_dict(self, state: int) -> None:
            is_loading.set()
            may_load.wait(10)
            super().load_state_dict(state)

    server = serving(Slow(), place)
    client = lp.CourierClient(server.endpoint)
    loading = client.futures.load_state_dict(5)
    assert is_loading.wait(10)
    with pytest.raises(lp.StateLost):
        client.add(1)
    may_load.set()
    loading.result(10)
    assert client.add(1) == 6
    server.close()


def test_a_coroutine_may_load_the_state(place: tuple[str, int]) -> None:
    server = serving(AsyncCounter(), place)
    client = lp.CourierClient(server.endpoint)
    with pytest.raises(lp.StateLost):
        client.add(1)
    client.load_state_dict(5)
    assert client.add(1) == 6
    server.close()


@pytest.mark.parametrize("has_lost_state", [True, False])
def test_the_initial_state_may_be_the_right_one(place: tuple[str, int], has_lost_state: bool) -> None:
    server = serving(Counter(), place, has_lost_state=has_lost_state)
    client = lp.CourierClient(server.endpoint)
    assert start_without_state(client) == has_lost_state
    assert not start_without_state(client)
    assert client.add(1) == 1
    server.close()
