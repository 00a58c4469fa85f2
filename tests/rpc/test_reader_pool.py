"""A server's threads notice the ends of connections, however late they look, and no blocked one holds up others."""

import queue
import socket
import threading
from pathlib import Path

import pytest

from lp_pipe import connections
from lp_pipe.connections import Frame, frames, kernel_calls
from lp_pipe.connections.unix import UnixConnection
from lp_pipe.rpc import CourierClient, Server, codec
from lp_pipe.rpc.reader_pool import ReaderPool

pytestmark = pytest.mark.skipif(not kernel_calls.has_epoll(), reason="no epoll on this system")
_WITHIN_S = 20.0


def test_an_end_is_noticed_that_came_with_the_last_data_while_all_threads_were_busy(no_leaks: None) -> None:
    # epoll tells of both at once, and only once: whoever stopped reading where the data did never heard of the end, and
    # the server kept what a client had begun that was killed right after it had sent something.
    threads = ReaderPool(1, "test")
    arrived: queue.Queue[Frame] = queue.Queue()
    reasons: queue.Queue[str] = queue.Queue()
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold(frame: Frame) -> None:
        is_held.set()
        may_go_on.wait(_WITHIN_S)

    (near, peer), (blocker, blocking_peer) = socket.socketpair(), socket.socketpair()
    connection, other = UnixConnection(near, "peer"), UnixConnection(blocker, "other peer")
    connection.attach(arrived.put, reasons.put)
    other.attach(hold, lambda reason: None)
    with blocking_peer, peer:
        for one in (connection, other):
            threads.read(one)
        peer.sendall(b"".join(frames.encode(Frame(frames.CALL, 1))))
        assert arrived.get(timeout=_WITHIN_S).id == 1
        threads.submit(may_go_on.wait, _WITHIN_S)
        blocking_peer.sendall(b"".join(frames.encode(Frame(frames.CALL, 2))))  # which the thread in reserve reads
        assert is_held.wait(_WITHIN_S)
        peer.sendall(b"".join(frames.encode(Frame(frames.CALL, 3))))
        peer.close()
        may_go_on.set()
        assert arrived.get(timeout=_WITHIN_S).id == 3
        assert "ended" in reasons.get(timeout=_WITHIN_S)
        threads.forget(other)
        other.close()
    threads.close()


def test_a_crew_goes_on_with_the_threads_it_has_when_the_system_has_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_leaks: None
) -> None:
    # A thread that did not start counted as an idle one, which everybody then left the reading and the tasks to.
    allow_only(monkeypatch, {"test-0"})
    threads = ReaderPool(3, "test")
    is_held, may_go_on = threading.Event(), threading.Event()
    results: queue.Queue[str] = queue.Queue()

    def hold() -> None:
        is_held.set()
        may_go_on.wait(_WITHIN_S)

    threads.submit(hold)
    assert is_held.wait(_WITHIN_S)
    for name in ("second", "third"):
        threads.submit(results.put, name)
    may_go_on.set()
    assert [results.get(timeout=_WITHIN_S) for _ in range(2)] == ["second", "third"]
    assert "test goes on with 1 of 3 threads: can't start new thread" in caplog.text
    threads.close()


def test_a_crew_without_any_thread_says_so_and_begins_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    threads = ReaderPool(2, "test")
    results: queue.Queue[str] = queue.Queue()
    with monkeypatch.context() as patched:
        allow_only(patched, set())
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(results.put, "first")
    threads.submit(results.put, "second")
    assert {results.get(timeout=_WITHIN_S) for _ in range(2)} == {"first", "second"}
    threads.close()


def allow_only(monkeypatch: pytest.MonkeyPatch, names: set[str]) -> None:
    """Let so many of the pool's threads be started, and no others."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("test-") and thread.name not in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("size", [1, 2, 16])
def test_a_handler_that_blocks_holds_up_no_other_call_that_came_with_it(
    size: int, socket_home: Path, no_leaks: None
) -> None:
    may_go_on = threading.Event()

    class Target:
        def name(self) -> str:
            return threading.current_thread().name

        def block(self) -> None:
            assert may_go_on.wait(_WITHIN_S)

    server = Server(Target(), f"unix:{socket_home}/server", thread_pool_size=size)
    replies: queue.Queue[int] = queue.Queue()
    connection = connections.connect(server.endpoint)
    connection.start(lambda frame: replies.put(frame.id), lambda reason: None)
    body = codec.encode(((), {})).body
    for number, method in enumerate(["name", "name", "block", "name"] if size > 1 else ["name", "name", "block"]):
        connection.send_later(Frame(frames.CALL, number, method, body))
    connection.flush()
    before = {replies.get(timeout=_WITHIN_S) for _ in range(3 if size > 1 else 2)}
    assert before == ({0, 1, 3} if size > 1 else {0, 1})
    may_go_on.set()
    assert replies.get(timeout=_WITHIN_S) == 2
    connection.close()
    server.close()


def test_a_handler_may_call_its_own_server(socket_home: Path, no_leaks: None) -> None:
    class Target:
        def down(self, steps: int) -> int:
            return 1 + client.down(steps - 1) if steps else 0

    server = Server(Target(), f"inproc:{socket_home}/server", thread_pool_size=4)
    client = CourierClient(server.endpoint, call_timeout=_WITHIN_S)
    assert client.down(3) == 3
    server.close()
