"""One contract for every carrier: frames in order both ways, one close with a reason, nothing taken from strangers."""

import contextlib
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence

import pytest

from lp_pipe import connections
from lp_pipe.connections import Frame, frames, inproc, unix
from lp_pipe.connections.credentials import current_credentials
from lp_pipe.errors import Unavailable
from tests.connections.carriers import WITHIN_S, Carrier, End, OpenCarrier


@pytest.fixture(params=["inproc", "unix", "local", "grpc", "grpcs", "tls"])
def carrier(request: pytest.FixtureRequest, no_leaks: None, open_carrier: OpenCarrier) -> Carrier:
    return open_carrier(request.param)


@pytest.fixture(params=["unix", "grpc", "grpcs", "tls"])
def wire(request: pytest.FixtureRequest, no_leaks: None, open_carrier: OpenCarrier) -> Carrier:
    """A carrier between processes."""
    return open_carrier(request.param)


@pytest.fixture
def unix_carrier(no_leaks: None, open_carrier: OpenCarrier) -> Carrier:
    return open_carrier("unix")


def test_frames_arrive_both_ways_as_they_were_sent(carrier: Carrier) -> None:
    client, server = carrier.pair()
    client.start()
    server.start()
    client.connection.send(Frame(frames.CALL, 7, "add", b"body", [b"one", b"", b"two"]))
    frame = server.next()
    assert (frame.kind, frame.id, frame.name, bytes(frame.body)) == (frames.CALL, 7, "add", b"body")
    assert [bytes(buffer) for buffer in frame.buffers] == [b"one", b"", b"two"]
    server.connection.send(Frame(frames.RESULT, 7))
    assert client.next().kind == frames.RESULT


def test_frames_of_a_thread_stay_in_order(carrier: Carrier) -> None:
    client, server = carrier.pair()
    client.start()
    server.start()

    def send(name: str) -> None:
        for number in range(300):
            client.connection.send(Frame(frames.CALL, number, name, b"x" * (number % 7)))

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    got = [server.next() for _ in range(900)]
    for thread in threads:
        thread.join(WITHIN_S)
    for name in "abc":
        assert [frame.id for frame in got if frame.name == name] == list(range(300))
    assert all(len(frame.body) == frame.id % 7 for frame in got)


def test_frames_sent_before_start_wait(carrier: Carrier) -> None:
    client, server = carrier.pair()
    for number in range(5):
        client.connection.send(Frame(frames.CALL, number))
    client.start()
    server.start()
    assert [server.next().id for _ in range(5)] == list(range(5))


def test_frames_stay_in_order_while_the_other_end_starts(carrier: Carrier) -> None:
    client, server = carrier.pair()
    client.start()

    def send() -> None:
        for number in range(2000):
            client.connection.send(Frame(frames.CALL, number))

    thread = threading.Thread(target=send)
    thread.start()
    server.start()
    assert [server.next().id for _ in range(2000)] == list(range(2000))
    thread.join(WITHIN_S)


@pytest.mark.parametrize("sizes", [[1 << 16], [(1 << 16) - 1, 1, 3], [64 << 20], [1] * 5000])
def test_buffers_of_any_size_and_number(carrier: Carrier, sizes: list[int]) -> None:
    client, server = carrier.pair()
    client.start()
    server.start()
    buffers = [os.urandom(min(size, 1000)) * (size // min(size, 1000)) for size in sizes]
    sending = threading.Thread(target=client.connection.send, args=(Frame(frames.CALL, 1, "", b"b", buffers),))
    sending.start()
    frame = server.next()
    sending.join(WITHIN_S)
    assert [bytes(buffer) for buffer in frame.buffers] == buffers
    client.connection.send(Frame(frames.CALL, 2))
    assert server.next().id == 2


def test_the_senders_later_writes_are_not_seen(carrier: Carrier) -> None:
    client, server = carrier.pair()
    data = bytearray(b"before")
    client.connection.send(Frame(frames.CALL, 1, "", b"", [memoryview(data)]))
    data[:] = b"after!"
    client.start()
    server.start()
    (buffer,) = server.next().buffers
    assert bytes(buffer) == b"before"
    buffer[:1] = b"B"  # and it can be written to
    assert data == b"after!"


def test_both_ends_learn_the_reason_once(carrier: Carrier) -> None:
    client, server = carrier.pair()
    client.start()
    server.start()
    client.connection.send(Frame(frames.CALL, 1))
    client.connection.close("I am done")
    client.connection.close("again")
    assert server.reason() == "I am done"
    assert client.reason() == "I am done"
    assert server.next().id == 1  # before the close
    assert client.connection.closed_reason == server.connection.closed_reason == "I am done"
    for end in (client, server):
        with pytest.raises(Unavailable, match="I am done"):
            end.connection.send(Frame(frames.CALL))
        assert end.reasons.empty()


def test_closing_before_start_is_told_at_the_start(carrier: Carrier) -> None:
    client, server = carrier.pair()
    client.connection.close("early")
    client.start()
    server.start()
    assert client.reason() == "early"
    assert server.reason() == "early"


def test_closing_inside_on_frame_is_allowed(carrier: Carrier) -> None:
    client, server = carrier.pair()
    client.start()
    server.connection.start(lambda frame: server.connection.close("seen enough"), server.reasons.put)
    client.connection.send(Frame(frames.CALL))
    assert client.reason() == "seen enough"
    assert server.reason() == "seen enough"


def test_nobody_there_is_unavailable(carrier: Carrier) -> None:
    with pytest.raises(Unavailable, match="listens at"):
        connections.connect(carrier.nowhere)
    client, server = carrier.pair()
    carrier.listener.close()
    with pytest.raises(Unavailable, match="listens at"):
        connections.connect(carrier.endpoint)
    client.start()
    server.start()
    client.connection.send(Frame(frames.CALL, 3))  # what was accepted stays open
    assert server.next().id == 3


def test_an_address_can_be_listened_at_again(carrier: Carrier) -> None:
    carrier.listener.close()
    again = connections.listen(carrier.endpoint, carrier.accepted.put)
    client, server = carrier.pair()
    client.start()
    server.start()
    client.connection.send(Frame(frames.CALL, 3))
    assert server.next().id == 3
    again.close()


def test_who_has_connected_but_was_not_accepted_in_time_is_told_why(unix_carrier: Carrier) -> None:
    # A sender whose hub closed just then had "Connection reset by peer" in place of the hub's reason.
    goes_on = threading.Event()
    endpoint = f"{unix_carrier.endpoint}-slow"
    slow = unix.listen(endpoint, lambda connection: (unix_carrier.take(connection), goes_on.wait(WITHIN_S)))
    first, second = (End(connections.connect(endpoint)).start() for _ in range(2))
    unix_carrier.accept()
    second.connection.send(Frame(frames.CALL, 1))
    slow.close("shut down")
    assert second.reason() == "shut down"
    goes_on.set()
    first.connection.close()


def test_an_unknown_carrier_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="pigeon:somewhere"):
        connections.connect("pigeon:somewhere")


def test_objects_pass_by_reference_within_a_process() -> None:
    near, far = inproc.pair()
    client, server = End(near).start(), End(far).start()
    thing = object()
    client.connection.send(Frame(frames.CHANNEL_DATA, buffers=[thing]))
    assert server.next().buffers[0] is thing
    near.close()


# Between processes.


COUNT = 1000  # more than gRPC takes ahead: its windows grow, on a busy machine beyond 10 MB


def test_a_peer_that_does_not_read_makes_the_sender_wait(wire: Carrier) -> None:
    client, server = wire.pair()
    client.start()
    sent = threading.Event()

    def send() -> None:
        for number in range(COUNT):
            client.connection.send(Frame(frames.CALL, number, "", b"x" * 100_000))
        sent.set()

    threading.Thread(target=send).start()
    assert not sent.wait(0.3)
    server.start()
    assert [server.next().id for _ in range(COUNT)] == list(range(COUNT))
    assert sent.wait(WITHIN_S)


def test_closing_frees_a_sender_that_waits_and_does_not_wait_itself(wire: Carrier) -> None:
    client, server = wire.pair()
    client.start()
    errors: queue.Queue[Exception] = queue.Queue()

    def send() -> None:
        try:
            while True:
                client.connection.send(Frame(frames.CALL, 1, "", b"x" * 100_000))
        except Unavailable as error:
            errors.put(error)

    threading.Thread(target=send).start()
    with pytest.raises(queue.Empty):
        errors.get(timeout=0.2)
    start = time.monotonic()
    client.connection.close("enough")
    assert time.monotonic() - start < 2.0
    assert errors.get(timeout=WITHIN_S)
    assert client.reason() == "enough"
    server.start()


def test_the_reason_is_the_closers_although_the_peer_reads_nothing(unix_carrier: Carrier) -> None:
    # The time limit of the farewell was set for both directions; the reader took it for the peer's silence.
    client, server = unix_carrier.pair()
    client.start()
    server.connection.send(Frame(frames.CALL, 1))
    client.next()
    client.connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # type: ignore[attr-defined]

    def send() -> None:
        with contextlib.suppress(Unavailable):
            client.connection.send(Frame(frames.CALL, 1, "", b"x" * 10_000_000))

    blocked = threading.Thread(target=send)
    blocked.start()
    client.connection.close("mine")
    assert client.reason() == "mine"
    blocked.join(WITHIN_S)


def test_a_killed_peer_closes_the_connection_with_a_reason(wire: Carrier) -> None:
    source = """
        import sys, time
        from lp_pipe import connections
        from lp_pipe.connections import Frame, credentials, frames
        credentials.use_credentials(credentials.Credentials.from_bytes(sys.stdin.buffer.read()))
        connection = connections.connect(sys.argv[1])
        connection.start(print, print)
        connection.send(Frame(frames.CALL, 5))
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(source), wire.endpoint]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert peer.stdin is not None
    with peer.stdin:
        peer.stdin.write(current_credentials().to_bytes())
    try:
        server = wire.accept().start()
        assert server.next().id == 5
        peer.send_signal(signal.SIGKILL)
        assert "killed" in server.reason()
        with pytest.raises(Unavailable):
            server.connection.send(Frame(frames.CALL))
    finally:
        peer.kill()
        peer.wait()


def test_silence_is_death_where_it_was_agreed_on(wire: Carrier) -> None:
    client = wire.connect(idle_timeout_s=0.2)
    silent = wire.accept().start()
    for _ in range(4):
        silent.connection.send(Frame(frames.CALL))
    client.start()  # which begins to count, and this thread may take a while between two frames
    for _ in range(4):
        client.next()
    assert "0.2 s" in client.reason()
    assert silent.reason()


def header(body_bytes: int = 0, buffer_bytes: Sequence[int] = ()) -> bytes:
    version = 1
    data = struct.pack(f"<BBHQQ{len(buffer_bytes)}Q", version, frames.CALL, 0, 0, body_bytes, *buffer_bytes)
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "limit"),
        (struct.pack("<I", (1 << 20) + 1), "limit"),
        (struct.pack("<I", 4) + b"\xff\xff\xff\xff", "parse"),
        (header(body_bytes=(1 << 36) + 1), "limit"),
        (header(buffer_bytes=[1 << 35] * 3), "limit"),
        (header(body_bytes=100) + b"too short", "ended inside a frame"),
        (header(body_bytes=100)[:3], "without a reason|inside a frame"),
    ],
)
def test_garbage_closes_the_connection_and_is_never_delivered(wire: Carrier, data: bytes, reason: str) -> None:
    close = wire.send_raw(data)
    server = wire.accept().start()
    assert re.search(reason, server.reason())
    assert server.frames.empty()
    close()
    client, other = wire.pair()  # the others do not notice
    client.start()
    other.start()
    client.connection.send(Frame(frames.CALL, 1))
    assert other.next().id == 1


def test_a_server_unpickles_nothing_of_a_broken_frame(wire: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []
    monkeypatch.setattr("pickle.loads", lambda *args, **kwargs: loaded.append(args[0]))
    close = wire.send_raw(os.urandom(5000))
    assert wire.accept().start().reason()
    assert not loaded
    close()


def test_an_announced_size_that_no_memory_holds_closes_only_this_connection(wire: Carrier) -> None:
    close = wire.send_raw(header(body_bytes=1 << 35))  # 32 GiB
    server = wire.accept().start()
    close()
    assert server.reason()


def test_strangers_are_turned_away(unix_carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix, "_is_same_user", lambda sock: False)
    with pytest.raises(Unavailable, match="another user"):
        connections.connect(unix_carrier.endpoint)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(unix_carrier.endpoint.removeprefix("unix:"))
        assert sock.recv(1) == b""
    assert unix_carrier.accepted.empty()


def test_a_listener_survives_a_shortage_of_file_descriptors(unix_carrier: Carrier) -> None:
    # accept() failed once, the accepting thread ended, and nobody could connect ever again.
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    socks = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        for sock in socks:
            sock.connect(unix_carrier.endpoint.removeprefix("unix:"))
        accepted = []
        with pytest.raises(queue.Empty):
            while True:
                accepted.append(unix_carrier.accepted.get(timeout=0.3))
        assert len(accepted) <= 1  # an accept that waits may have its descriptor already
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    accepted += [unix_carrier.accepted.get(timeout=WITHIN_S) for _ in socks[len(accepted) :]]
    for end in (*accepted, *socks):
        end.close()


@pytest.mark.parametrize("kind", ["unix", "tls"])
def test_a_caller_that_cannot_be_taken_in_is_told_so_and_later_ones_are_taken(
    no_leaks: None, open_carrier: OpenCarrier, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # A thread that could not be started was the end of the accepting one: callers connected, and waited for ever.
    carrier = open_carrier(kind)

    def no_more_threads(connection: connections.Connection) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(carrier.listener, "_on_connection", no_more_threads)
        refused = carrier.connect().start()
        assert "RuntimeError: can't start new thread: this user" in refused.reason()
    client, server = carrier.pair()
    client.start()
    server.start()
    client.connection.send(Frame(frames.CALL, 1))
    assert server.next().id == 1


@pytest.mark.parametrize("kind", ["unix", "tls"])
def test_a_process_that_cannot_take_a_frame_says_so(
    no_leaks: None, open_carrier: OpenCarrier, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Regression: its peers were told that it had ended or was killed."""

    def memory_for(size: int) -> memoryview:
        raise MemoryError

    client, server = open_carrier(kind).pair()
    client.start()
    server.start()
    monkeypatch.setattr("lp_pipe.connections.socket_reader.memory_for", memory_for)
    with contextlib.suppress(Unavailable):  # the rest of it may find the connection closed
        client.connection.send(Frame(frames.CALL, 1, "", b"", [bytes(4 << 20)]))
    for end in (client, server):
        assert end.reason() == "a frame arrived that does not fit into memory"
