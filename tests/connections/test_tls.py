"""Frames between hosts over TLS: who may connect, what strangers cost, what a slow or lost peer costs."""

import contextlib
import dataclasses
import os
import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lp_pipe import connections
from lp_pipe.connections import Connection, Frame, doorman, frames, reach, tls
from lp_pipe.connections.credentials import (
    RUN_NAME,
    Credentials,
    generate_credentials,
    use_credentials,
)
from lp_pipe.connections.doorman import GREETING, MAGIC
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
    """What comes until the end, however that comes."""
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
    monkeypatch.setattr(doorman, "_PATIENCE_S", 0.3)
    host, port = carrier.endpoint.split(":")[1:]
    strangers = [socket.create_connection((host, int(port)), timeout=WITHIN_S) for _ in range(50)]
    assert_works(carrier)
    for stranger in strangers:
        assert everything(stranger) == b""  # it was shown out
        stranger.close()
    assert carrier.listener.refusals.count == 50  # type: ignore[attr-defined]


def test_of_too_many_strangers_the_first_must_go(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorman, "_MOST_VISITORS", 3)
    host, port = carrier.endpoint.split(":")[1:]
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=WITHIN_S)) for _ in range(5)
        ]
        assert everything(strangers[0]) == everything(strangers[1]) == b""
        assert_works(carrier)


# What a peer costs that is slow, or lost.


@pytest.mark.skipif(not reach.IS_SUPPORTED, reason="this system does not say when something was acknowledged")
def test_a_host_that_acknowledges_nothing_is_out_of_reach(carrier: Carrier) -> None:
    # Nothing on one host drops what passes through the loopback (tests/launch/engines cuts real links): here silence is
    # so short that no probe has been sent yet, and what is looked at is the time since the handshake.
    connection = tls.connect(carrier.endpoint, silence_s=0.2)
    client, server = End(connection).start(), carrier.accept().start()
    assert "answered nothing for 0.2 s" in client.reason()
    assert server.reason()


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
