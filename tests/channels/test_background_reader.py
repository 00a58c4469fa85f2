"""The background reader: one thread reads all channels of a process, and sleeps while there is nothing to read."""

import os
import queue
import threading
from typing import Any

import pytest

from lp_pipe.channels import background_reader
from lp_pipe.connections import Frame, PulledConnection, frames, kernel_calls
from tests.connections.carriers import WITHIN_S, End, OpenCarrier
from tests.connections.conftest import open_carrier as open_carrier
from tests.waiting import until

pytestmark = pytest.mark.skipif(not kernel_calls.has_epoll(), reason="no epoll on this system")


class Counted(dict[int, Any]):
    """A registry of connections that counts the background reader's look-ups when it wakes."""

    looks = 0

    def get(self, *args: Any) -> Any:
        self.looks += 1
        return super().get(*args)


def watched_server(
    open_carrier: OpenCarrier,
) -> tuple[End, End, background_reader.WatchedConnection, "queue.Queue[None]"]:
    """Yield both ends of a carrier, and a queue of the background reader's reads at the server's end."""
    client, server = open_carrier("tls").pair()
    client.start()
    assert isinstance(server.connection, PulledConnection)
    server.connection.attach(server.frames.put, server.reasons.put)
    was_read: queue.Queue[None] = queue.Queue()
    return client, server, background_reader.shared.watch(server.connection, lambda: was_read.put(None)), was_read


def test_much_that_arrives_is_read_while_the_owner_does_something_else(open_carrier: OpenCarrier) -> None:
    client, server, watched, was_read = watched_server(open_carrier)
    assert isinstance(server.connection, PulledConnection)
    for number in range(3):
        client.connection.send(Frame(frames.CALL, number, body=bytes(20 << 20)))
        was_read.get(timeout=WITHIN_S)
        until(server.connection.try_reading)  # the background reader may be just doing it
        watched.pause()  # the rest, which the system has room for, is the owner's to read
        while server.frames.empty():
            if server.connection.wait(WITHIN_S):
                server.connection.read()
        watched.leave()
        assert server.next().id == number
    client.connection.close("that was all")
    assert server.reason() == "that was all"


def test_little_that_arrives_waits_for_the_owner_and_wakes_nobody(open_carrier: OpenCarrier) -> None:
    client, server, watched, was_read = watched_server(open_carrier)
    assert isinstance(server.connection, PulledConnection)
    client.connection.send(Frame(frames.CALL, 1))
    with pytest.raises(queue.Empty):
        was_read.get(timeout=0.2)
    watched.pause()
    assert server.connection.wait(WITHIN_S)
    server.connection.read_alone(0)
    assert server.next().id == 1
    watched.resume()
    client.connection.close("that was all")
    assert server.reason() == "that was all"


def test_a_hang_up_wakes_it_once_although_a_forked_child_still_has_the_socket(
    open_carrier: OpenCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    # While an owner reads, nothing is asked for; epoll tells of a hang-up all the same, and did so for ever, taking a
    # core, where the kernel could not forget the socket because a child of os.fork() had it.
    client, server, watched, _ = watched_server(open_carrier)
    connection = server.connection
    assert isinstance(connection, PulledConnection)
    looks = Counted(background_reader.shared._watched)
    monkeypatch.setattr(background_reader.shared, "_watched", looks)
    kept = os.dup(connection.fileno())  # as a child would
    assert connection.try_reading()
    watched.pause()
    client.connection.close("done")
    while connection.closed_reason is None and connection.wait(WITHIN_S):
        connection.read()
    connection.done_reading()
    background_reader.shared.forget(watched)
    assert server.reason() == "done"
    threading.Event().wait(0.1)
    assert looks.looks < 20
    os.close(kept)


def test_an_owner_who_reads_right_after_the_background_reader_is_woken_by_little(
    open_carrier: OpenCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It said only then that little is not worth waking: the owner slept until 256 KiB were there, or for
    # ever.
    client, server, watched, _ = watched_server(open_carrier)
    connection = server.connection
    assert isinstance(connection, PulledConnection)
    done_reading, has_paused = connection.done_reading, threading.Event()
    was_woken = threading.Event()

    def own() -> None:
        assert connection.try_reading()
        watched.pause()
        has_paused.set()
        while server.frames.empty() and connection.wait(WITHIN_S):  # TLS has words of its own
            connection.read()
        watched.leave()
        was_woken.set()

    def done_and_the_owner_reads() -> None:
        monkeypatch.setattr(connection, "done_reading", done_reading)
        done_reading()
        threading.Thread(target=own, daemon=True).start()
        assert has_paused.wait(WITHIN_S)

    monkeypatch.setattr(connection, "done_reading", done_and_the_owner_reads)
    assert connection.try_reading()
    background_reader.shared._read(watched)  # as when it was woken
    client.connection.send(Frame(frames.CALL, 1))
    assert was_woken.wait(2 * WITHIN_S)
    assert server.frames.get_nowait().id == 1
    client.connection.close("that was all")
    assert server.reason() == "that was all"
