"""Futures whose replies have a known reader: no timer looks after them."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.connections import io_thread
from lp_pipe.rpc import reply_reader
from lp_pipe.rpc.futures import read_by
from lp_pipe.rpc.server import Server

WITHIN_S = 20.0


class Doubler:
    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def double(self, number: int) -> int:
        return 2 * number

    def late(self, number: int) -> int:
        assert self.may_answer.wait(WITHIN_S)
        return 2 * number


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def client(doubler: Doubler, socket_home: Path, no_leaks: None) -> Iterator[lp.CourierClient]:
    server = Server(doubler, f"unix:{socket_home}/server", thread_pool_size=4)
    client = lp.CourierClient(server.endpoint)
    yield client
    del client
    server.close()


@pytest.fixture
def no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(when: float, action: object) -> None:
        raise AssertionError("a timer was set")

    monkeypatch.setattr(io_thread.shared, "at", at)


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("read ")}


def test_who_asks_soon_reads_the_reply_himself(
    client: lp.CourierClient, no_timers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reply_reader, "_FOREGROUND_LIMIT_S", WITHIN_S
    )  # on a busy machine a reply may take longer than that
    assert client.double(1) == 2  # it is connected
    before = readers()
    futures = [read_by("caller", client).double(number) for number in range(10)]
    assert [future.result(WITHIN_S) for future in futures] == [2 * number for number in range(10)]
    assert readers() == before


def test_a_thread_reads_for_who_asks_late(client: lp.CourierClient, no_timers: None) -> None:
    assert client.double(1) == 2
    settled = threading.Event()
    future = read_by("thread", client).double(3)
    Future.add_done_callback(future, lambda _: settled.set())  # the client's own would call a thread to read
    assert settled.wait(WITHIN_S)
    assert future.result(0) == 6


@pytest.mark.parametrize("reader", ["caller", "thread"])
def test_the_first_call_of_a_client_connects_whoever_reads(client: lp.CourierClient, reader: str) -> None:
    future = read_by(reader, client).double(4)  # type: ignore[arg-type]
    assert future.result(WITHIN_S) == 8


def test_who_asks_soon_may_ask_while_a_thread_reads_for_another(client: lp.CourierClient, doubler: Doubler) -> None:
    assert client.double(1) == 2
    late = read_by("thread", client).late(5)
    assert read_by("caller", client).double(6).result(WITHIN_S) == 12
    doubler.may_answer.set()
    assert late.result(WITHIN_S) == 10


@pytest.mark.parametrize("reader", ["caller", "thread"])
def test_the_end_of_the_server_settles_them(doubler: Doubler, socket_home: Path, reader: str) -> None:
    server = Server(doubler, f"unix:{socket_home}/server", thread_pool_size=4)
    client = lp.CourierClient(server.endpoint, wait_for_ready=False)
    assert client.double(1) == 2
    future = read_by(reader, client).late(1)  # type: ignore[arg-type]
    server.close(0)
    with pytest.raises(lp.Unavailable):
        future.result(WITHIN_S)
    doubler.may_answer.set()


@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "first call"])
def test_without_a_thread_for_the_replies_calls_fail_and_later_ones_go_on(
    client: lp.CourierClient, doubler: Doubler, is_connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody ever read them: what nobody waited for in a thread of its own was never settled.
    start = threading.Thread.start

    def no_readers(thread: threading.Thread) -> None:
        if thread.name.startswith("read "):
            raise RuntimeError("can't start new thread")
        start(thread)

    if is_connected:
        assert client.double(1) == 2
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_readers)
        future = read_by("thread", client).late(5)
        with pytest.raises(lp.Unavailable, match="no thread for reading the replies: can't start new thread"):
            future.result(WITHIN_S)
        doubler.may_answer.set()
        assert client.double(6) == 12
    assert read_by("thread", client).double(7).result(WITHIN_S) == 14


@pytest.mark.parametrize(
    ("missing", "what_for"),
    [("connect ", "to connect"), (io_thread.NAME, "to watch its call_timeout")],
    ids=["new", "limit"],
)
def test_a_future_for_which_there_is_no_thread_says_which_limit(
    client: lp.CourierClient, missing: str, what_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Making it raised Python's bare RuntimeError.
    start = threading.Thread.start

    def short(thread: threading.Thread) -> None:
        if thread.name.startswith(missing):
            raise RuntimeError("can't start new thread")
        start(thread)

    caller = lp.CourierClient(client.address, call_timeout=WITHIN_S)
    if missing == io_thread.NAME:
        assert caller.double(1) == 2
    monkeypatch.setattr(io_thread, "shared", io_thread.IoThread())
    monkeypatch.setattr(threading.Thread, "start", short)
    future = caller.futures.double(2)
    with pytest.raises(lp.Unavailable, match=rf"double\(\): no thread {what_for}: can't start new thread: .*ulimit -u"):
        future.result(WITHIN_S)
    assert caller.double(3) == 6
