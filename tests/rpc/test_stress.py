"""Many threads, few connections, and servers that come and go: nothing hangs, and no answer goes astray."""

import concurrent.futures
import contextlib
import faulthandler
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.rpc import Server

WITHIN_S = 30.0


class Target:
    def back(self, value: Any) -> Any:
        return value

    def slow(self, value: Any) -> Any:
        time.sleep(0.005)
        return value

    def count(self, n: int) -> Iterator[int]:
        yield from range(n)

    async def later(self, value: Any) -> Any:
        return value


def together(users: list[Callable[[], None]]) -> None:
    """Run all in threads; the first error is raised, and a thread that hangs is one."""
    errors: list[BaseException] = []

    def run(user: Callable[[], None]) -> None:
        try:
            user()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(user,), daemon=True) for user in users]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WITHIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for error in errors:
        raise error
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        pytest.fail("some threads hang; their stacks are in the output")


@pytest.fixture
def endpoint(no_leaks: None, socket_home: Path) -> str:
    return f"unix:{socket_home}/server"


def call(client: lp.CourierClient, kind: int, value: Any) -> Any:
    """The value, back in one of the ways that there are."""
    if kind == 0:
        return client.back(value)
    if kind == 1:
        return client.futures.slow(value).result(WITHIN_S)
    if kind == 2:
        (future,) = concurrent.futures.as_completed([client.futures.back(value)], WITHIN_S)
        return future.result()
    if kind == 3:
        return value if list(client.count(20)) == list(range(20)) else None
    if kind == 4:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        client.futures.back(value).add_done_callback(lambda done: settle(answer, done))
        return answer.result(WITHIN_S)
    return client.later(value)


def settle(answer: "concurrent.futures.Future[Any]", done: "concurrent.futures.Future[Any]") -> None:
    error = done.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())


@pytest.mark.parametrize("pool", [0, 1, 4])
def test_threads_that_share_a_client_get_their_own_answers(endpoint: str, pool: int) -> None:
    server = Server(Target(), endpoint, thread_pool_size=pool)
    client = lp.CourierClient(endpoint)

    def use(number: int) -> None:
        for i in range(60):
            assert call(client, random.randrange(6), (number, i)) == (number, i)

    together([lambda number=number: use(number) for number in range(8)])
    server.close()


def test_cancelled_and_timed_out_calls_leave_no_reader_behind(endpoint: str) -> None:
    server = Server(Target(), endpoint, thread_pool_size=4)
    client, impatient = lp.CourierClient(endpoint), lp.CourierClient(endpoint, call_timeout=0.003)

    def use(number: int) -> None:
        for i in range(60):
            future = client.futures.slow(i)
            if random.random() < 0.5:
                future.cancel()
            with contextlib.suppress(lp.DeadlineExceeded):
                impatient.slow(i)
            with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                assert future.result(random.choice([0, 0.001, WITHIN_S])) == i
            assert client.back((number, i)) == (number, i)

    together([lambda number=number: use(number) for number in range(6)])
    server.close()


def test_a_server_that_comes_and_goes_loses_no_caller(endpoint: str) -> None:
    clients = [lp.CourierClient(endpoint) for _ in range(2)]
    is_over = threading.Event()
    answered = []

    def serve() -> None:
        try:
            for _ in range(25):
                server = Server(Target(), endpoint, thread_pool_size=3)
                time.sleep(random.random() * 0.02)
                server.close(grace_s=random.choice([0.0, 0.05]))
        finally:
            is_over.set()
        server = Server(Target(), endpoint, thread_pool_size=3)
        assert ended.wait(WITHIN_S)
        server.close()

    def use(number: int) -> None:
        for i in range(10_000):
            was_over = is_over.is_set()
            try:
                assert call(clients[number % 2], random.randrange(6), (number, i)) == (number, i)
                answered.append(number)
                if was_over:
                    break
            except lp.Unavailable:
                pass
        if finished.wait() == 0:
            ended.set()

    ended = threading.Event()
    finished = threading.Barrier(6)
    together([serve, *(lambda number=number: use(number) for number in range(6))])
    assert set(answered) == set(range(6))


def test_large_arrays_of_many_threads_do_not_mix(endpoint: str) -> None:
    server = Server(Target(), endpoint, thread_pool_size=4)
    client = lp.CourierClient(endpoint)

    def use(number: int) -> None:
        kept = []
        for i in range(15):
            sent = np.full(50_000 + 10_000 * (i % 4), number * 1000 + i)
            kept.append((number * 1000 + i, client.back(sent)))
            if i % 3 == 0:
                kept[-1][1][:10] = kept[-1][0]  # what came is one's own
        for value, array in kept:
            assert (array == value).all()

    together([lambda number=number: use(number) for number in range(6)])
    server.close()


def test_a_client_works_in_a_forked_child_and_its_parent_goes_on(endpoint: str) -> None:
    server = Server(Target(), endpoint, thread_pool_size=2)
    client = lp.CourierClient(endpoint, call_timeout=5.0)
    client.back(np.ones(100_000))
    assert client.futures.back(1).result(WITHIN_S) == 1
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            assert [call(client, kind, kind) for kind in range(6)] == list(range(6))
            assert client.back(np.ones(50_000)).all()
            del client
            status = 0
        os._exit(status)
    for i in range(50):
        assert client.back(i) == i
    assert os.waitpid(child, 0)[1] == 0
    assert client.futures.back(4).result(WITHIN_S) == 4
    server.close()


def test_a_client_that_was_connecting_at_the_fork_works_in_the_child(endpoint: str) -> None:
    # The thread that held the lock of connecting is not there.
    client = lp.CourierClient(endpoint, call_timeout=WITHIN_S)
    connecting = threading.Thread(target=client.back, args=(1,))
    connecting.start()
    while client._reconnector._lock.acquire(blocking=False):
        client._reconnector._lock.release()
        time.sleep(0)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = client.back(0)
        os._exit(status)
    server = Server(Target(), endpoint, thread_pool_size=2)
    assert os.waitpid(child, 0)[1] == 0
    connecting.join(WITHIN_S)
    server.close()


def test_a_stream_that_a_forked_child_closes_is_still_its_parents(endpoint: str) -> None:
    """Regression: the child closed the stream on the parent's connection, and the parent's loop failed."""

    class Counter:
        def count(self) -> Iterator[int]:
            yield from range(100)

    server = Server(Counter(), endpoint, thread_pool_size=2)
    client = lp.CourierClient(endpoint, call_timeout=WITHIN_S)
    items = client.count()
    first = next(items)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            items.close()  # as when it leaves the loop
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [first, *items] == [*range(100)]
    server.close()


def told_in_child(work: Callable[[], object]) -> str:
    """Return what the work raises in a forked child."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_is_refused_its_parents_stream(endpoint: str) -> None:
    """Regression: it took what had arrived, sent credits on its parent's connection, and then waited for ever."""

    class Counter:
        def count(self) -> Iterator[int]:
            yield from range(100)

    server = Server(Counter(), endpoint, thread_pool_size=2)
    items = lp.CourierClient(endpoint, call_timeout=WITHIN_S).count()
    first = next(items)
    assert re.match(r"Unavailable: this stream .* was forked from: call again here", told_in_child(lambda: next(items)))
    assert [first, *items] == [*range(100)]
    server.close()


def test_a_forked_child_is_refused_the_reply_of_its_parents_call(endpoint: str) -> None:
    """Regression: it read the reply from its parent's connection, and the parent waited for ever."""
    is_forked = threading.Event()

    class Slow:
        def answer(self) -> int:
            is_forked.wait(WITHIN_S)
            return 7

    server = Server(Slow(), endpoint, thread_pool_size=2)
    future = lp.CourierClient(endpoint).futures.answer()
    assert re.match(r"Unavailable: the pending call of answer\(\) .*: call again", told_in_child(future.result))
    is_forked.set()
    assert future.result(WITHIN_S) == 7
    server.close()
