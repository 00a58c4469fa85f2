"""Clients that come and go, and threads that share one, call in every way at once: nothing is lost, nothing is left."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.rpc.server import Server

WITHIN_S = 30.0
DURATION_S = 1.5


class Adder:
    def add(self, a: int, b: int) -> int:
        return a + b

    def later(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def count(self, items: int) -> Iterator[int]:
        yield from range(items)


def call(client: lp.CourierClient) -> None:
    assert client.add(1, 2) == 3


def wait_a_little(client: lp.CourierClient) -> None:
    client.later(random.random() * 0.005)


def ask_for_futures(client: lp.CourierClient) -> None:
    futures = [client.futures.add(number, number) for number in range(random.randint(1, 40))]
    assert [future.result(WITHIN_S) for future in futures] == [2 * number for number in range(len(futures))]


def ask_late(client: lp.CourierClient) -> None:
    future = client.futures.add(1, 1)
    time.sleep(0.003)  # longer than the patience with futures that nobody asks for
    assert future.result(WITHIN_S) == 2


def be_called_back(client: lp.CourierClient) -> None:
    is_done = threading.Event()
    client.futures.add(1, 1).add_done_callback(lambda future: is_done.set())
    assert is_done.wait(WITHIN_S)


def iterate(client: lp.CourierClient) -> None:
    assert list(client.count(5)) == list(range(5))


WAYS: list[Callable[[lp.CourierClient], None]] = [
    call, call, wait_a_little, ask_for_futures, ask_late, be_called_back, iterate,
]  # fmt: skip


@pytest.mark.parametrize("threads", [0, 1, 2, 16])
def test_no_call_is_lost(threads: int, socket_home: Path, no_leaks: None) -> None:
    server = Server(Adder(), f"unix:{socket_home}/server", thread_pool_size=threads)
    shared = lp.CourierClient(server.endpoint, call_timeout=WITHIN_S)
    failures: list[BaseException] = []
    end = time.monotonic() + DURATION_S

    def until_the_end(new_client: Callable[[], lp.CourierClient], calls: int) -> None:
        try:
            while time.monotonic() < end:
                client = new_client()
                for _ in range(random.randint(1, calls)):
                    random.choice(WAYS)(client)
        except BaseException as error:
            failures.append(error)

    own = (lambda: lp.CourierClient(server.endpoint, call_timeout=WITHIN_S), 20)
    callers = [threading.Thread(target=until_the_end, args=own) for _ in range(6)]
    callers += [threading.Thread(target=until_the_end, args=(lambda: shared, 20)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    server.close()
    assert not failures
