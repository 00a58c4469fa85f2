"""gRPC streams between hosts: authentication, the cost of a stalled or lost peer, what is left after closing."""

import concurrent.futures
import contextlib
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lp_pipe import connections
from lp_pipe.connections import Frame, frames, grpc_channels, grpc_stream, tcp_endpoint
from lp_pipe.connections.chunks import CHUNK_BYTES
from lp_pipe.connections.credentials import RUN_NAME, Credentials, current_credentials, generate_credentials
from lp_pipe.errors import Unauthenticated, Unavailable
from lp_pipe.rpc import Server
from tests.connections.carriers import WITHIN_S, Carrier, End, OpenCarrier, assert_works, raw_stream
from tests.connections.payloads import Mark, Target, call_frame


@pytest.fixture(params=["grpc", "grpcs"])
def tcp(request: pytest.FixtureRequest, no_leaks: None, open_carrier: OpenCarrier) -> Carrier:
    return open_carrier(request.param)


# Who may connect.


@pytest.fixture(params=["grpc", "grpcs"])
def server(request: pytest.FixtureRequest, no_leaks: None, run_credentials: Credentials) -> Iterator[Server]:
    with contextlib.closing(Server(Target(), f"{request.param}:127.0.0.1:0", name="server/0")) as server:
        yield server


def refused(server: Server, data: bytes, token: str | None) -> grpc.StatusCode:
    """Return how a stranger's stream ends whose first message is `data`."""
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
        tls, options = channels.get(stranger), grpc_channels.CLIENT_OPTIONS
        channel = grpc.secure_channel(target, tls, options) if tls else grpc.insecure_channel(target, options)
        greeting = list(grpc_channels.greeting(run_credentials, int(target.rpartition(":")[2])).items())
        stub = channel.stream_stream(f"/{grpc_channels.SERVICE}/{grpc_channels.METHOD}")
        with channel, pytest.raises(grpc.RpcError) as caught:
            next(stub(iter([call_frame(Mark(tmp_path / "mark"))]), metadata=greeting))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert not (tmp_path / "mark").exists()
        assert server.calls == 0


def test_a_client_that_expects_tls_is_told_that_there_is_none(no_leaks: None, open_carrier: OpenCarrier) -> None:
    endpoint = open_carrier("grpc").endpoint
    with pytest.raises(Unauthenticated, match="does not speak TLS"):
        connections.connect(endpoint.replace("grpc:", "grpcs:"))


def test_who_listens_and_does_not_know_the_token_is_told_nothing_and_not_believed(no_leaks: None) -> None:
    # It was sent the token, and what it answered was read.
    token, seen = "0123456789abcdef" * 4, []

    class Anything(Credentials):
        """Credentials of a process that has taken an ended listener's port, and accepts any token."""

        def is_proof(self, shown: str, whose: str, nonce: str) -> bool:
            seen.extend([shown, nonce])
            return True

    accepted: queue.SimpleQueue[connections.Connection] = queue.SimpleQueue()
    his = Anything("x" * 64, b"", b"", b"")
    with contextlib.closing(grpc_stream.listen("grpc:127.0.0.1:0", accepted.put, his)) as listener:
        with pytest.raises(Unauthenticated, match="does not know the token") as caught:
            connections.connect(f"{listener.endpoint}#{token}")
        accepted.get(timeout=WITHIN_S).close()
    shown, nonce = seen
    assert token not in shown + nonce + str(caught.value)
    # Nor does what he was shown open another listener of the run for him.
    with contextlib.closing(grpc_stream.listen(f"grpc:127.0.0.1:0#{token}", accepted.put)) as other:
        said = [(grpc_channels.NONCE, nonce), (grpc_channels.SHOWN, shown)]
        with grpc.insecure_channel(other.endpoint.removeprefix("grpc:").partition("#")[0]) as channel:
            stub = channel.stream_stream(f"/{grpc_channels.SERVICE}/{grpc_channels.METHOD}")
            with pytest.raises(grpc.RpcError, match="a wrong token"):
                next(stub(iter([]), metadata=said, timeout=WITHIN_S))
        assert accepted.empty() and other.refusals.count == 1


def test_who_listens_and_never_answers_keeps_nobody_waiting(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "_CONNECT_PATIENCE_S", 0.2)
    is_over = threading.Event()

    def accept(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        is_over.wait(WITHIN_S)
        return iter([])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        handlers = {grpc_channels.METHOD: grpc.stream_stream_rpc_method_handler(accept)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(grpc_channels.SERVICE, handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(Unavailable, match="did not answer"):
            connections.connect(f"grpc:127.0.0.1:{port}#token")
        is_over.set()
        server.stop(None).wait(WITHIN_S)


def test_a_listener_survives_a_shortage_of_threads(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # gRPC's own thread ended, and every later client waited without end.
    monkeypatch.setattr(grpc_stream, "_CONNECT_PATIENCE_S", 0.5)
    start = threading.Thread.start

    def start_no_stream(thread: threading.Thread) -> None:
        if thread.name == "grpc stream":
            raise RuntimeError("can't start new thread")
        start(thread)

    accepted: queue.SimpleQueue[connections.Connection] = queue.SimpleQueue()
    with contextlib.closing(grpc_stream.listen("grpc:127.0.0.1:0#token", accepted.put)) as listener:
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", start_no_stream)
            with pytest.raises(Unavailable, match="did not answer"):
                connections.connect(listener.endpoint)
        monkeypatch.undo()
        guest, host = End(connections.connect(listener.endpoint)).start(), End(accepted.get(timeout=WITHIN_S)).start()
        assert listener.refusals.count == 1
        guest.connection.close("well")
        assert host.reason() == "well"


@pytest.mark.slow
def test_who_speaks_http2_and_opens_no_stream_is_thrown_out(no_leaks: None) -> None:
    # gRPC's limit for handshakes is over with HTTP/2's first words: each such peer kept a descriptor for ever.
    accepted: queue.SimpleQueue[connections.Connection] = queue.SimpleQueue()
    with contextlib.closing(grpc_stream.listen("grpc:127.0.0.1:0#token", accepted.put)) as listener:
        guest, host = End(connections.connect(listener.endpoint)).start(), End(accepted.get(timeout=WITHIN_S)).start()
        with socket.create_connection(("127.0.0.1", tcp_endpoint.parse(listener.endpoint).port), WITHIN_S) as stranger:
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0")
            while stranger.recv(1 << 16):
                pass
        guest.connection.send(Frame(frames.CALL, 1))
        assert host.next().id == 1  # who has come in may be silent
        guest.connection.close()
        assert host.reason()


# Liveness, limits and what they cost.


def test_a_message_over_the_limit_ends_the_connection(tcp: Carrier) -> None:
    limit = [("grpc.max_send_message_length", -1), ("grpc.ssl_target_name_override", RUN_NAME)]
    credentials = current_credentials()
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    target = tcp.endpoint.partition(":")[2]
    is_secure = tcp.endpoint.startswith("grpcs:")
    with grpc.secure_channel(target, tls, limit) if is_secure else grpc.insecure_channel(target, limit) as channel:
        stub = channel.stream_stream(f"/{grpc_channels.SERVICE}/{grpc_channels.METHOD}")
        greeting = list(grpc_channels.greeting(credentials, int(target.rpartition(":")[2])).items())
        call = stub(iter([b"x" * (CHUNK_BYTES + 1)]), metadata=greeting)
        server = tcp.accept().start()
        assert server.reason()
        assert server.frames.empty()
        assert call.code() != grpc.StatusCode.OK
    assert_works(tcp)


@pytest.mark.parametrize("scheme", [pytest.param("grpc", marks=pytest.mark.slow), "grpcs"])
def test_a_peer_that_answers_no_more_is_noticed(no_leaks: None, run_credentials: Credentials, scheme: str) -> None:
    # A stopped process is to its peer what a cut cable is: the connection is open, and nothing comes.
    accepted: queue.SimpleQueue[connections.Connection] = queue.SimpleQueue()
    listener = grpc_stream.listen(f"{scheme}:127.0.0.1:0", accepted.put, silence_s=1.0)
    source = """
        import sys, time
        from lp_pipe import connections
        from lp_pipe.connections import credentials
        credentials.use_credentials(credentials.Credentials.from_bytes(sys.stdin.buffer.read()))
        connection = connections.connect(sys.argv[1])
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(source), listener.endpoint]
    with contextlib.closing(listener), subprocess.Popen(command, stdin=subprocess.PIPE) as peer:
        assert peer.stdin is not None
        with peer.stdin:
            peer.stdin.write(current_credentials().to_bytes())
        server = End(accepted.get(timeout=WITHIN_S)).start()
        with pytest.raises(queue.Empty):
            server.reasons.get(timeout=1.5)  # idle, and alive
        peer.send_signal(signal.SIGSTOP)
        try:
            assert "unreachable" in server.reason()
        finally:
            peer.kill()
