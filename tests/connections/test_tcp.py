"""Carriers over TCP: authentication, the cost of a slow or lost peer, what is left after closing."""

import contextlib
import dataclasses
import os
import queue
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

import lp_pipe as lp
from lp_pipe import connections
from lp_pipe.connections import Connection, Frame, frames
from lp_pipe.connections.credentials import Credentials, generate_credentials, use_credentials
from lp_pipe.errors import Unauthenticated, Unavailable
from lp_pipe.rpc import Server
from tests.connections.carriers import WITHIN_S, Carrier, End, OpenCarrier, assert_works
from tests.connections.payloads import Target

SCHEMES = ["grpc", "grpcs", "tls"]


@pytest.fixture(params=SCHEMES)
def tcp(request: pytest.FixtureRequest, no_leaks: None, open_carrier: OpenCarrier) -> Carrier:
    return open_carrier(request.param)


@pytest.fixture(params=SCHEMES)
def server(request: pytest.FixtureRequest, no_leaks: None, run_credentials: Credentials) -> Iterator[Server]:
    with contextlib.closing(Server(Target(), f"{request.param}:127.0.0.1:0", name="server/0")) as server:
        yield server


def test_the_listener_says_which_port_it_got(tcp: Carrier) -> None:
    scheme, host, port = tcp.listener.endpoint.split(":")
    assert scheme in SCHEMES and host == tcp.host
    assert int(port) > 0
    with pytest.raises(OSError, match="cannot listen at"):
        connections.listen(tcp.listener.endpoint, print)  # two listeners never share a port


@pytest.mark.parametrize("scheme", ["grpcs", "tls"])
def test_hosts_connect_by_a_name_that_is_not_the_address_that_was_bound(
    no_leaks: None, run_credentials: Credentials, scheme: str
) -> None:
    accepted: queue.Queue[Connection] = queue.Queue()
    with contextlib.closing(connections.listen(f"{scheme}:localhost@0.0.0.0:0", accepted.put)) as listener:
        assert listener.endpoint.startswith(f"{scheme}:localhost:")
        client = End(connections.connect(listener.endpoint)).start()
        server = End(accepted.get(timeout=WITHIN_S)).start()
        client.connection.send(Frame(frames.CALL, 1))
        assert server.next().id == 1
        client.connection.close()


# Who may connect.


def test_raw_bytes_to_the_port_reach_nobody(server: Server) -> None:
    host, port = server.endpoint.split(":")[1:]
    like_http2, like_tls = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\x05"
    for data in (os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n", like_http2 + os.urandom(500), like_tls + os.urandom(500)):
        with socket.create_connection((host, int(port)), timeout=WITHIN_S) as sock:
            sock.sendall(data)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1000):  # they may greet and say goodbye
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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_listener_needs_credentials(no_leaks: None, scheme: str) -> None:
    with pytest.raises(Unauthenticated, match="use_credentials"):
        connections.listen(f"{scheme}:127.0.0.1:0", print)


@pytest.mark.parametrize("token", ["wrong", ""])
def test_a_certificate_alone_is_not_enough(tcp: Carrier, run_credentials: Credentials, token: str) -> None:
    use_credentials(dataclasses.replace(run_credentials, token=token))
    with pytest.raises(Unauthenticated, match="token"):
        tcp.connect()
    assert tcp.accepted.empty()
    use_credentials(run_credentials)
    assert_works(tcp)


# What a peer costs that is slow, or gone.


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


def test_both_ends_send_at_once_and_more_than_the_network_holds(tcp: Carrier) -> None:
    client, server = tcp.pair()
    client.start()
    server.start()
    data = os.urandom(1 << 20) * 30

    def send(end: End) -> None:
        for number in range(3):
            end.connection.send(Frame(frames.CALL, number, "", b"", [data]))

    threads = [threading.Thread(target=send, args=(end,)) for end in (client, server)]
    for thread in threads:
        thread.start()
    for end in (client, server):
        for number in range(3):
            frame = end.next()
            assert (frame.id, frame.buffers[0]) == (number, data)
    for thread in threads:
        thread.join(WITHIN_S)


def test_what_was_sent_before_the_close_arrives_although_the_peer_is_slow(tcp: Carrier) -> None:
    client, server = tcp.pair()
    client.start()
    got: list[int] = []

    def on_frame(frame: Frame) -> None:
        time.sleep(0.02)  # the slow peer itself
        got.append(frame.id)

    server.connection.send(Frame(frames.CALL, 7, "", b"x" * 10_000))  # which nobody will read
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
            assert peer.stdin is not None and peer.stderr is not None
            with peer.stdin:
                peer.stdin.write(run_credentials.to_bytes())
            server = tcp.accept().start()
            assert (peer.stderr.read(), peer.wait(WITHIN_S)) == (b"", 0)
        assert reason in server.reason()
        assert how == "exit" or server.next().id == 5


@pytest.mark.parametrize("scheme", ["grpcs", "tls"])
def test_nothing_is_left_after_closing(no_leaks: None, open_carrier: OpenCarrier, scheme: str) -> None:
    def rounds(number: int) -> int:
        for _ in range(number):
            with contextlib.closing(open_carrier(scheme)) as tcp:
                client, server = tcp.pair()
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
