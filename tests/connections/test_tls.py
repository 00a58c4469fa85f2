"""Frames between hosts over TLS: authentication, the cost of strangers, and of a slow or lost peer."""

import contextlib
import dataclasses
import errno
import gc
import os
import queue
import select
import selectors
import socket
import ssl
import struct
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from lp_pipe import connections
from lp_pipe.connections import Connection, Frame, PulledConnection, frames, tcp_liveness, tls, tls_acceptor
from lp_pipe.connections.credentials import (
    RUN_NAME,
    Credentials,
    generate_credentials,
    use_credentials,
)
from lp_pipe.connections.socket_connection import SocketConnection
from lp_pipe.connections.tls_acceptor import GREETING, MAGIC
from lp_pipe.connections.tls_stream import client_context
from lp_pipe.errors import Unauthenticated, Unavailable
from lp_pipe.rpc import Server
from tests.connections.carriers import WITHIN_S, Carrier, End, OpenCarrier, assert_works, raw_tls
from tests.connections.payloads import Mark, Target, call_frame


@pytest.fixture
def carrier(no_leaks: None, open_carrier: OpenCarrier) -> Carrier:
    return open_carrier("tls")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here that takes IPv4 as well")
def test_a_listener_at_any_address_is_reached_by_both_internet_protocols(
    no_leaks: None, run_credentials: Credentials
) -> None:
    accepted: queue.Queue[Connection] = queue.Queue()
    with contextlib.closing(connections.listen("tls:localhost@[::]:0", accepted.put)) as listener:
        port = listener.endpoint.rpartition(":")[2]
        for address in ("127.0.0.1", "[::1]"):
            connection = connections.connect(f"tls:{address}:{port}")
            accepted.get(timeout=WITHIN_S).close()
            connection.close()


# Who may connect.


@pytest.fixture
def server(no_leaks: None, run_credentials: Credentials) -> Iterator[Server]:
    with contextlib.closing(Server(Target(), "tls:127.0.0.1:0", name="server/0")) as server:
        yield server


def tcp(server: Server) -> socket.socket:
    host, port = server.endpoint.split(":")[1:]
    return socket.create_connection((host, int(port)), timeout=WITHIN_S)


def greeting(token: str) -> bytes:
    return GREETING.pack(MAGIC, len(token)) + token.encode()


def everything(sock: socket.socket) -> bytes:
    """Return all bytes until the end, however that comes."""
    data = b""
    with contextlib.suppress(OSError):
        while part := sock.recv(1000):
            data += part
    return data


def test_a_payload_leaves_its_mark_when_the_token_is_right(
    server: Server, run_credentials: Credentials, tmp_path: Path
) -> None:
    with raw_tls(server.endpoint) as sock:
        sock.sendall(call_frame(Mark(tmp_path / "mark")))
        assert sock.recv(1)
    assert (tmp_path / "mark").exists()  # so the tests below would see it


@pytest.mark.parametrize("token", ["", "0" * 64], ids=["empty", "wrong"])
def test_without_the_token_nothing_is_unpickled(
    server: Server, run_credentials: Credentials, tmp_path: Path, token: str
) -> None:
    with client_context(run_credentials).wrap_socket(tcp(server), server_hostname=RUN_NAME) as sock:
        sock.sendall(greeting(token) + call_frame(Mark(tmp_path / "mark")))
        assert b"token" in everything(sock)
    assert not (tmp_path / "mark").exists()
    assert server.calls == 0


def context(authority: Credentials, own: Credentials | None, folder: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE  # a stranger does not mind
    if own is not None:
        (folder / "pem").write_bytes(own.certificate + own.key)
        made.load_cert_chain(folder / "pem")
    return made


@pytest.mark.parametrize("stranger", ["another run's certificate", "no certificate", "an old TLS", "plain"])
def test_without_the_runs_certificate_nothing_is_unpickled(
    server: Server, run_credentials: Credentials, tmp_path: Path, stranger: str
) -> None:
    own = {"another run's certificate": generate_credentials(), "an old TLS": run_credentials}.get(stranger)
    data = greeting(run_credentials.token) + call_frame(Mark(tmp_path / "mark"))
    with tcp(server) as bare:
        if stranger == "plain":
            bare.sendall(data)
            everything(bare)
        else:
            made = context(run_credentials, own, tmp_path)
            if stranger == "an old TLS":
                made.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(OSError), made.wrap_socket(bare) as sock:
                sock.sendall(data)
                if not sock.recv(1):
                    raise ConnectionResetError
    assert not (tmp_path / "mark").exists()
    assert server.calls == 0


def test_a_client_whose_certificate_the_listener_does_not_know_is_told_so(
    server: Server, run_credentials: Credentials
) -> None:
    other = generate_credentials()
    use_credentials(dataclasses.replace(run_credentials, certificate=other.certificate, key=other.key))
    with pytest.raises(Unauthenticated, match=r"refused this process.*use_credentials"):
        connections.connect(server.endpoint)


def test_a_client_is_told_that_there_is_no_tls(no_leaks: None, run_credentials: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=lambda: listening.accept()[0].sendall(b"220 mail.example.org\r\n"))
        answering.start()
        with pytest.raises(Unauthenticated, match="does not speak TLS"):
            connections.connect(f"tls:127.0.0.1:{listening.getsockname()[1]}")
        answering.join(WITHIN_S)


def test_who_does_not_answer_is_unavailable(
    no_leaks: None, run_credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_CONNECT_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(Unavailable, match=r"within 0\.2 s"):
        connections.connect(f"tls:127.0.0.1:{listening.getsockname()[1]}")


# Strangers who take their time.


def test_strangers_who_say_nothing_hold_up_nobody_and_are_counted(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_acceptor, "_HANDSHAKE_LIMIT_S", 0.3)
    host, port = carrier.endpoint.split(":")[1:]
    strangers = [socket.create_connection((host, int(port)), timeout=WITHIN_S) for _ in range(50)]
    assert_works(carrier)
    for stranger in strangers:
        assert everything(stranger) == b""  # it was shown out
        stranger.close()
    assert carrier.listener.refusals.count == 50  # type: ignore[attr-defined]


def test_strangers_leave_most_of_the_descriptors_to_others(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_acceptor, "most_descriptors", lambda: 8)
    host, port = carrier.endpoint.split(":")[1:]
    with contextlib.ExitStack() as stack:
        first, *_ = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=WITHIN_S)) for _ in range(3)
        ]
        assert everything(first) == b""
        assert_works(carrier)


def test_of_too_many_strangers_the_first_must_go(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_acceptor, "_MAX_HANDSHAKES", 3)
    host, port = carrier.endpoint.split(":")[1:]
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=WITHIN_S)) for _ in range(5)
        ]
        assert everything(strangers[0]) == everything(strangers[1]) == b""
        assert_works(carrier)


def test_who_leaves_before_being_let_in_closes_the_door_to_nobody(no_leaks: None, run_credentials: Credentials) -> None:
    # Once the ssl module's error about such a socket ended the thread that accepts: one port scan, and no more guests.
    is_held, may_go_on = threading.Event(), threading.Event()
    accepted: queue.Queue[Connection] = queue.Queue()

    def hold(connection: Connection) -> None:
        is_held.set()
        may_go_on.wait(WITHIN_S)
        accepted.put(connection)

    with contextlib.closing(connections.listen("tls:127.0.0.1:0", hold)) as listener:
        first = connections.connect(listener.endpoint)
        assert is_held.wait(WITHIN_S)
        for data in (b"", b"x" * 100):
            stranger = socket.create_connection(("127.0.0.1", int(listener.endpoint.rpartition(":")[2])))
            stranger.sendall(data)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()  # with a reset
        may_go_on.set()
        second = connections.connect(listener.endpoint)
        for connection in (first, accepted.get(timeout=WITHIN_S), second, accepted.get(timeout=WITHIN_S)):
            connection.close()
        assert listener.refusals.count == 2  # type: ignore[attr-defined]


def test_a_guest_who_cannot_be_taken_in_is_told_so_and_the_next_one_is_not_affected(
    no_leaks: None, run_credentials: Credentials
) -> None:
    accepted: queue.Queue[Connection] = queue.Queue()
    errors = [OSError(errno.EMFILE, "Too many open files")]

    def take(connection: Connection) -> None:
        if errors:
            raise errors.pop()
        accepted.put(connection)

    with contextlib.closing(connections.listen("tls:127.0.0.1:0", take)) as listener:
        assert "Too many open files" in End(connections.connect(listener.endpoint)).start().reason()
        connection = connections.connect(listener.endpoint)
        accepted.get(timeout=WITHIN_S).close()
        connection.close()


def test_who_is_refused_and_never_stops_sending_has_to_let_the_others_pass(run_credentials: Credentials) -> None:
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            end.setblocking(False)
        far.send(b"x" * 3 * tls_acceptor._DISCARDED_BYTES)
        handshake = tls_acceptor._Handshake(cast(ssl.SSLSocket, near), "somewhere", run_credentials)
        handshake.refuse()
        assert next(handshake.steps) == selectors.EVENT_READ
        assert near.recv(1)  # it was not read to the end at once


# What a peer costs that is slow, or lost.


def test_what_was_sent_before_the_close_arrives_although_a_wait_was_interrupted(carrier: Carrier) -> None:
    # As a channel's sender closes: the interruption ended the reading in the background, so that what the peer sent
    # afterwards (credits) came to a closed socket, and took back what was still on its way to the peer.
    client, server = carrier.pair()
    assert isinstance(client.connection, PulledConnection)
    client.connection.make_interruptible()
    client.connection.attach(client.frames.put, client.reasons.put)
    for number in range(100):
        client.connection.send(Frame(frames.CALL, number, "", b"x" * 20_000))
    client.connection.interrupt()
    client.connection.close("all sent")
    got: list[int] = []

    def on_frame(frame: Frame) -> None:
        got.append(frame.id)
        server.connection.send(Frame(frames.RESULT, frame.id))
        time.sleep(0.001)  # the slow peer itself

    server.connection.start(on_frame, server.reasons.put)
    assert server.reason() == "all sent"
    assert got == list(range(100))


def test_a_wait_can_be_interrupted_while_a_peer_that_does_not_read_keeps_a_sender(carrier: Carrier) -> None:
    # The sender held the lock that `interrupt` took: a channel could neither be aborted nor closed meanwhile.
    client, server = carrier.pair()
    assert isinstance(client.connection, PulledConnection)
    client.connection.make_interruptible()
    client.connection.attach(client.frames.put, client.reasons.put)
    sending = threading.Thread(target=client.connection.send, args=(Frame(frames.CALL, 1, "", b"x" * (64 << 20)),))
    sending.start()
    sending.join(0.3)
    assert sending.is_alive()
    interrupting = threading.Thread(target=client.connection.interrupt, daemon=True)
    interrupting.start()
    interrupting.join(WITHIN_S / 4)
    assert not interrupting.is_alive()
    assert not client.connection.wait(WITHIN_S)
    server.start()
    assert server.next().id == 1
    sending.join(WITHIN_S)


@pytest.mark.skipif(not tcp_liveness.IS_SUPPORTED, reason="this system does not say when something was acknowledged")
def test_a_host_that_acknowledges_nothing_is_out_of_reach(carrier: Carrier) -> None:
    # Nothing on one host drops what passes through the loopback (tests/launch/engines cuts real links): here silence is
    # so short that no probe has been sent yet, and what is looked at is the time since the handshake.
    connection = tls.connect(carrier.endpoint, silence_s=0.2)
    client, server = End(connection).start(), carrier.accept().start()
    assert "answered nothing for 0.2 s" in client.reason()
    assert server.reason()


@pytest.mark.skipif(not tcp_liveness.IS_SUPPORTED, reason="this system does not say when something was acknowledged")
def test_out_of_reach_is_the_reason_also_inside_a_frame(carrier: Carrier) -> None:
    client, server = End(tls.connect(carrier.endpoint, silence_s=0.2)).start(), carrier.accept().start()
    assert isinstance(server.connection, tls.TlsConnection)
    server.connection._send(frames.encode(Frame(frames.CALL, 1, "", b"x" * 100))[:1])
    assert "answered nothing for 0.2 s" in client.reason()


def test_the_kernels_own_time_limit_is_an_end_and_not_a_pause(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Told once only: taken for "nothing is there", it left a connection that nobody would read again.
    client, _ = carrier.pair()
    assert isinstance(client.connection, tls.TlsConnection)
    client.connection.attach(client.frames.put, client.reasons.put)

    def time_out(flags: int) -> int:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(client.connection._reader, "receive", time_out)
    assert client.connection.try_reading()
    client.connection.read()
    client.connection.done_reading()
    assert "timed out" in client.reason()


def test_who_forgets_a_connection_without_closing_it_ends_it(carrier: Carrier) -> None:
    connection = tls.connect(carrier.endpoint)
    server = carrier.accept().start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del connection
        gc.collect()
    assert "without a reason" in server.reason()


def test_a_connection_that_was_reset_before_the_greeting_is_unavailable(run_credentials: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sock = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        select.select([sock], [], [], WITHIN_S)
        with pytest.raises(Unavailable, match="closed the connection before it began"):
            tls._greeted(sock, "tls:there", run_credentials, time.monotonic() + WITHIN_S)


def test_the_rest_of_an_interrupted_frame_is_sent_with_the_next_one(
    no_leaks: None, open_carrier: OpenCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = open_carrier("unix").pair()
    client.start()
    server.start()
    assert isinstance(client.connection, SocketConnection)
    send_pieces = client.connection._send_pieces

    def interrupted(pieces: list[Any], descriptors: Sequence[int] = (), *, may_wait: bool = True) -> None:
        monkeypatch.setattr(client.connection, "_send_pieces", send_pieces)
        send_pieces(pieces[:1], descriptors, may_wait=may_wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(client.connection, "_send_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.connection.send(Frame(frames.CALL, 1, "", b"x" * 100))
    client.connection.send(Frame(frames.CALL, 2, "", b"y"))
    assert [(frame.id, bytes(frame.body)) for frame in (server.next(), server.next())] == [(1, b"x" * 100), (2, b"y")]


def test_a_send_that_was_interrupted_ends_the_connection(
    no_leaks: None, open_carrier: OpenCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else what is sent next is taken for the rest of the frame.
    client, server = open_carrier("tls").pair()
    client.start()
    server.start()
    assert isinstance(client.connection, SocketConnection)
    send_pieces = client.connection._send_pieces

    def interrupted(pieces: list[Any], descriptors: Sequence[int] = (), *, may_wait: bool = True) -> None:
        send_pieces(pieces[:1], descriptors, may_wait=may_wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(client.connection, "_send_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.connection.send(Frame(frames.CALL, 1, "", b"x" * 100))
    assert server.reason() == "the peer ended inside a frame"
    assert client.reason()
    assert server.frames.empty()


@pytest.mark.slow
def test_a_peer_that_reads_nothing_for_long_is_within_reach(carrier: Carrier) -> None:
    connection = tls.connect(carrier.endpoint, silence_s=4.0)
    client, server = End(connection).start(), carrier.accept()
    data = b"x" * (1 << 20)
    sending = threading.Thread(target=lambda: [connection.send(Frame(frames.CALL, n, "", data)) for n in range(20)])
    sending.start()
    with pytest.raises(queue.Empty):
        client.reasons.get(timeout=15.0)
    server.start()
    assert [server.next().id for _ in range(20)] == list(range(20))
    sending.join(WITHIN_S)


def test_a_certificate_is_never_in_a_file_that_others_can_read(run_credentials: Credentials) -> None:
    client_context.__globals__["_contexts"].cache_clear()
    names = set(os.listdir(os.environ.get("TMPDIR", "/tmp")))
    client_context(run_credentials)
    assert set(os.listdir(os.environ.get("TMPDIR", "/tmp"))) == names
