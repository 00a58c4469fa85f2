"""Frames between hosts: who may connect, what a stalled or lost peer costs, what is left after closing."""

import contextlib
import dataclasses
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

import lp_pipe as lp
from lp_pipe import connections
from lp_pipe.connections import Connection, Frame, frames, grpc_stream
from lp_pipe.connections.chunks import CHUNK_BYTES
from lp_pipe.connections.credentials import Credentials, generate_credentials, use_credentials
from lp_pipe.errors import Unauthenticated, Unavailable
from lp_pipe.rpc import Server
from tests.connections.carriers import WITHIN_S, Carrier, End, OpenCarrier, raw_stream


@pytest.fixture(params=["grpc", "grpcs"])
def tcp(request: pytest.FixtureRequest, no_leaks: None, open_carrier: OpenCarrier) -> Carrier:
    return open_carrier(request.param)


def assert_works(carrier: Carrier) -> None:
    client, server = carrier.pair()
    client.start()
    server.start()
    client.connection.send(Frame(frames.CALL, 1))
    assert server.next().id == 1


def test_the_listener_says_which_port_it_got(tcp: Carrier) -> None:
    scheme, host, port = tcp.listener.endpoint.split(":")
    assert scheme in ("grpc", "grpcs") and host == tcp.host
    assert int(port) > 0
    with pytest.raises(OSError, match="cannot listen at"):
        connections.listen(tcp.listener.endpoint, print)  # two listeners never share a port


def test_hosts_connect_by_a_name_that_is_not_the_address_that_was_bound(
    no_leaks: None, run_credentials: Credentials
) -> None:
    accepted: queue.Queue[Connection] = queue.Queue()
    listener = connections.listen("grpcs:localhost@0.0.0.0:0", accepted.put)
    assert listener.endpoint.startswith("grpcs:localhost:")
    client = End(connections.connect(listener.endpoint)).start()
    server = End(accepted.get(timeout=WITHIN_S)).start()
    client.connection.send(Frame(frames.CALL, 1))
    assert server.next().id == 1
    client.connection.close()
    listener.close()


# Who may connect.


class Target:
    def add(self, item: object) -> None:
        pass


class Mark:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def call_frame(mark: Mark) -> bytes:
    """What a client sends to call `add` with an argument that leaves a mark."""
    return b"".join(frames.encode(Frame(frames.CALL, 1, "add", pickle.dumps(((mark,), {})))))


@pytest.fixture(params=["grpc", "grpcs"])
def server(request: pytest.FixtureRequest, no_leaks: None, run_credentials: Credentials) -> Iterator[Server]:
    with contextlib.closing(Server(Target(), f"{request.param}:127.0.0.1:0", name="server/0")) as server:
        yield server


def refused(server: Server, data: bytes, token: str | None) -> grpc.StatusCode:
    """How a stranger's stream ends whose first message is `data`."""
    channel, call = raw_stream(server.endpoint, [data], token)
    with channel, pytest.raises(grpc.RpcError):
        next(call)  # type: ignore[call-overload]
    code: grpc.StatusCode = call.code()  # type: ignore[attr-defined]
    return code


def test_a_payload_leaves_its_mark_when_the_token_is_right(
    server: Server, run_credentials: Credentials, tmp_path: Path
) -> None:
    sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    sent.put(call_frame(Mark(tmp_path / "mark")))
    channel, call = raw_stream(server.endpoint, iter(sent.get, None), run_credentials.token)
    with channel:
        next(call)  # type: ignore[call-overload]
        sent.put(None)
    assert (tmp_path / "mark").exists()  # so the tests below would see it


@pytest.mark.parametrize("token", [None, "", "0" * 64], ids=["none", "empty", "wrong"])
def test_without_the_token_nothing_is_unpickled(server: Server, tmp_path: Path, token: str | None) -> None:
    data = call_frame(Mark(tmp_path / "mark"))
    assert refused(server, data, token) == grpc.StatusCode.UNAUTHENTICATED
    assert not (tmp_path / "mark").exists()
    assert server.calls == 0


@pytest.mark.parametrize("stranger", ["wrong authority", "wrong certificate", "no certificate", "plain"])
def test_without_the_runs_certificate_nothing_is_unpickled(
    no_leaks: None, run_credentials: Credentials, tmp_path: Path, stranger: str
) -> None:
    other = generate_credentials()
    channels = {
        "wrong authority": grpc.ssl_channel_credentials(other.authority, other.key, other.certificate),
        "wrong certificate": grpc.ssl_channel_credentials(run_credentials.authority, other.key, other.certificate),
        "no certificate": grpc.ssl_channel_credentials(run_credentials.authority),
    }
    with contextlib.closing(Server(Target(), "grpcs:127.0.0.1:0")) as server:
        target = server.endpoint.removeprefix("grpcs:")
        tls, options = channels.get(stranger), grpc_stream._CLIENT_OPTIONS
        channel = grpc.secure_channel(target, tls, options) if tls else grpc.insecure_channel(target, options)
        stub = channel.stream_stream(f"/{grpc_stream._SERVICE}/{grpc_stream._METHOD}")
        with channel, pytest.raises(grpc.RpcError) as caught:
            next(stub(iter([call_frame(Mark(tmp_path / "mark"))]), metadata=[("lp-pipe-token", run_credentials.token)]))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert not (tmp_path / "mark").exists()
        assert server.calls == 0


def test_raw_bytes_to_the_port_reach_nobody(server: Server) -> None:
    host, port = server.endpoint.split(":")[1:]
    for data in (os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(500)):
        with socket.create_connection((host, int(port)), timeout=WITHIN_S) as sock:
            sock.sendall(data)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1000):  # gRPC may greet and say goodbye
                    pass
    assert server.calls == 0
    assert lp.list_methods(lp.CourierClient(server.endpoint, call_timeout=WITHIN_S)) == ["add"]


def test_a_client_with_other_credentials_is_told_what_to_do_and_does_not_wait(server: Server) -> None:
    use_credentials(generate_credentials())
    with pytest.raises(Unauthenticated, match=r"add\(\).*use_credentials\(\)"):
        lp.CourierClient(server.endpoint, wait_for_ready=True).add(1, 2)
    use_credentials(None)
    with pytest.raises(Unauthenticated, match="no credentials"):
        lp.CourierClient(server.endpoint, wait_for_ready=True).add(1, 2)


def test_a_client_that_expects_tls_is_told_that_there_is_none(no_leaks: None, open_carrier: OpenCarrier) -> None:
    endpoint = open_carrier("grpc").endpoint
    with pytest.raises(Unauthenticated, match="does not speak TLS"):
        connections.connect(endpoint.replace("grpc:", "grpcs:"))


def test_a_listener_needs_credentials(no_leaks: None) -> None:
    with pytest.raises(Unauthenticated, match="use_credentials"):
        connections.listen("grpc:127.0.0.1:0", print)


@pytest.mark.parametrize("token", ["wrong", ""])
def test_a_certificate_alone_is_not_enough(tcp: Carrier, run_credentials: Credentials, token: str) -> None:
    use_credentials(dataclasses.replace(run_credentials, token=token))
    with pytest.raises(Unauthenticated, match="token"):
        tcp.connect()
    assert tcp.accepted.empty()
    use_credentials(run_credentials)
    assert_works(tcp)


# Liveness, limits and what they cost.


def test_a_peer_that_does_not_read_costs_bounded_memory(tcp: Carrier) -> None:
    client, server = tcp.pair()
    client.start()
    is_free = threading.Event()
    got: queue.Queue[int] = queue.Queue()

    def on_frame(frame: Frame) -> None:
        is_free.wait(WITHIN_S)
        got.put(frame.id)

    server.connection.start(on_frame, server.reasons.put)
    before = psutil.Process().memory_info().rss
    data = b"x" * (1 << 20)
    sent: queue.Queue[int] = queue.Queue()

    def send() -> None:
        for number in range(200):
            client.connection.send(Frame(frames.CALL, number, "", b"", [data]))
            sent.put(number)

    sending = threading.Thread(target=send)
    sending.start()
    with pytest.raises(queue.Empty):
        while True:
            sent.get(timeout=0.5)
    assert psutil.Process().memory_info().rss - before < 64 << 20  # of 200 MiB
    is_free.set()
    assert [got.get(timeout=WITHIN_S) for _ in range(200)] == list(range(200))
    sending.join(WITHIN_S)


def test_one_stalled_connection_does_not_stop_another(tcp: Carrier) -> None:
    stalled, _ = tcp.pair()

    def send() -> None:
        with contextlib.suppress(Unavailable):
            while True:
                stalled.connection.send(Frame(frames.CALL, 1, "", b"x" * (1 << 20)))

    sending = threading.Thread(target=send)
    sending.start()
    for _ in range(10):
        assert_works(tcp)
    stalled.connection.close()
    sending.join(WITHIN_S)
    assert not sending.is_alive()


def test_a_message_over_the_limit_ends_the_connection(tcp: Carrier) -> None:
    limit = [("grpc.max_send_message_length", -1), ("grpc.ssl_target_name_override", grpc_stream.RUN_NAME)]
    credentials = grpc_stream.current_credentials()
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    target = tcp.endpoint.partition(":")[2]
    is_secure = tcp.endpoint.startswith("grpcs:")
    with grpc.secure_channel(target, tls, limit) if is_secure else grpc.insecure_channel(target, limit) as channel:
        stub = channel.stream_stream(f"/{grpc_stream._SERVICE}/{grpc_stream._METHOD}")
        call = stub(iter([b"x" * (CHUNK_BYTES + 1)]), metadata=[("lp-pipe-token", credentials.token)])
        server = tcp.accept().start()
        assert server.reason()
        assert server.frames.empty()
        assert call.code() != grpc.StatusCode.OK
    assert_works(tcp)


def test_what_was_sent_before_the_close_arrives_although_the_peer_is_slow(tcp: Carrier) -> None:
    client, server = tcp.pair()
    client.start()
    got: list[int] = []

    def on_frame(frame: Frame) -> None:
        time.sleep(0.02)  # the slow peer itself
        got.append(frame.id)

    for number in range(50):
        client.connection.send(Frame(frames.CALL, number, "", b"x" * 10_000))
    client.connection.close("all sent")
    server.connection.start(on_frame, server.reasons.put)
    assert server.reason() == "all sent"
    assert got == list(range(50))


def test_a_process_that_closes_and_exits_is_understood(tcp: Carrier, run_credentials: Credentials) -> None:
    source = """
        import sys
        from lp_pipe import connections
        from lp_pipe.connections import Frame, credentials, frames
        credentials.use_credentials(credentials.Credentials.from_bytes(sys.stdin.buffer.read()))
        connection = connections.connect(sys.argv[1])
        connection.start(print, lambda reason: None)
        connection.send(Frame(frames.CALL, 5, "", b"x" * 1_000_000))
        if sys.argv[2] == "close":
            connection.close("that was all")
    """
    for how, reason in (("close", "that was all"), ("exit", "ended")):
        command = [sys.executable, "-c", textwrap.dedent(source), tcp.endpoint, how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as peer:
            assert peer.stdin is not None
            with peer.stdin:
                peer.stdin.write(run_credentials.to_bytes())
            server = tcp.accept().start()
            assert peer.stderr is not None
            assert (peer.stderr.read(), peer.wait(WITHIN_S)) == (b"", 0)
        assert reason in server.reason()
        assert how == "exit" or server.next().id == 5


@pytest.mark.parametrize("scheme", ["grpc", "grpcs"])
def test_a_peer_that_answers_no_more_is_noticed(
    no_leaks: None,
    run_credentials: Credentials,
    monkeypatch: pytest.MonkeyPatch,
    open_carrier: OpenCarrier,
    scheme: str,
) -> None:
    # A stopped process is to its peer what a cut cable is: the connection is open, and nothing comes.
    quick = [(name, min(value, 300) if name.endswith("_ms") else value) for name, value in grpc_stream._SERVER_OPTIONS]
    monkeypatch.setattr(grpc_stream, "_SERVER_OPTIONS", quick)
    carrier = open_carrier(scheme)
    source = """
        import sys, time
        from lp_pipe import connections
        from lp_pipe.connections import credentials
        credentials.use_credentials(credentials.Credentials.from_bytes(sys.stdin.buffer.read()))
        connection = connections.connect(sys.argv[1])
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(source), carrier.endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as peer:
        assert peer.stdin is not None
        with peer.stdin:
            peer.stdin.write(grpc_stream.current_credentials().to_bytes())
        server = carrier.accept().start()
        with pytest.raises(queue.Empty):
            server.reasons.get(timeout=1.5)  # idle, and alive
        peer.send_signal(signal.SIGSTOP)
        try:
            assert "out of reach" in server.reason()
        finally:
            peer.kill()


def test_nothing_is_left_after_closing(no_leaks: None, open_carrier: OpenCarrier) -> None:
    def rounds(number: int) -> int:
        for _ in range(number):
            with contextlib.closing(open_carrier("grpcs")) as carrier:
                client, server = carrier.pair()
                client.start()
                server.start()
                client.connection.close()
                assert server.reason()
        return psutil.Process().num_fds()

    before = rounds(3)  # gRPC keeps a few for itself
    assert rounds(20) - before < 10


@pytest.mark.slow
def test_a_gibibyte_goes_as_one_buffer(tcp: Carrier) -> None:
    client, server = tcp.pair()
    client.start()
    server.start()
    data = bytearray(1 << 30)
    data[-1] = 7
    client.connection.send(Frame(frames.CALL, 1, "", b"", [data]))
    (buffer,) = server.next().buffers
    assert (len(buffer), buffer[-1]) == (1 << 30, 7)
