"""A server with one reading thread answers all callers in it, and no caller can hold up the others."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe import connections
from lp_pipe.connections import Frame, frames
from lp_pipe.connections.unix import UnixConnection
from lp_pipe.rpc import Server, codec
from tests.waiting import until

WITHIN_S = 20.0


class Quick:
    """Handlers that return at once."""

    def thread(self) -> int:
        return threading.get_ident()

    def zeros(self, size: int) -> bytes:
        return bytes(size)

    def fail(self) -> None:
        raise ValueError("as planned")

    async def later(self, value: int) -> int:
        return value

    def count(self, n: int) -> Iterator[int]:
        yield from range(n)


@pytest.fixture
def server(socket_home: Path, no_leaks: None) -> Iterator[Server]:
    server = Server(Quick(), f"unix:{socket_home}/server", thread_pool_size=0, has_shared_reader=True)
    yield server
    server.close(1.0)


def raw_connection(server: Server) -> UnixConnection:
    """Return a connection of which no thread reads the replies."""
    connection = connections.connect(server.endpoint)
    assert isinstance(connection, UnixConnection)
    connection.attach(lambda frame: None, lambda reason: None)
    return connection


def call_of(method: str, *args: Any) -> Frame:
    payload = codec.encode((args, {}))
    return Frame(frames.CALL, 1, method, payload.body, payload.buffers)


def test_all_callers_are_answered_by_one_thread(server: Server) -> None:
    clients = [lp.CourierClient(server.endpoint) for _ in range(3)]
    assert len({client.thread() for client in clients for _ in range(2)}) == 1
    assert [client.futures.zeros(size).result(WITHIN_S) for client in clients for size in (0, 1 << 20)] == [
        bytes(size) for _ in clients for size in (0, 1 << 20)
    ]
    with pytest.raises(ValueError, match="as planned"):
        clients[0].fail()
    assert clients[1].later(3) == 3 and list(clients[2].count(4)) == [0, 1, 2, 3]
    del clients[0]
    assert clients[0].zeros(1) == bytes(1)


def test_a_caller_that_reads_nothing_holds_up_no_other(server: Server) -> None:
    client, frozen = lp.CourierClient(server.endpoint), [raw_connection(server) for _ in range(3)]
    for connection in frozen:
        for _ in range(20):  # more than the socket takes
            connection.send(call_of("zeros", 40_000))
    assert client.zeros(100_000) == bytes(100_000)
    for connection in frozen:
        connection.close()


def test_a_caller_that_never_pauses_leaves_turns_to_others(server: Server) -> None:
    client, busy = lp.CourierClient(server.endpoint), lp.CourierClient(server.endpoint)
    is_over, calls = threading.Event(), 0

    def flood() -> None:
        while not is_over.is_set():
            wait([busy.futures.zeros(1) for _ in range(2_000)], WITHIN_S)

    thread = threading.Thread(target=flood)
    thread.start()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        client.zeros(1)
        calls += 1
    is_over.set()
    thread.join(WITHIN_S)
    assert calls >= 3


def test_ends_of_callers_and_of_the_server_are_noticed(server: Server) -> None:
    for _ in range(20):
        connection = raw_connection(server)
        connection.send(call_of("zeros", 3))
        connection.close()
    until(lambda: not server._connections)
    client = lp.CourierClient(server.endpoint, wait_for_ready=False)
    assert client.zeros(1) == bytes(1)
    server.close()
    with pytest.raises(lp.Unavailable):
        client.zeros(1)
