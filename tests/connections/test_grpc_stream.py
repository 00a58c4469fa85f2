"""Frames between hosts: who may connect, what a stalled or lost peer costs, what is left after closing."""

import contextlib
import queue
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lp_pipe import connections
from lp_pipe.connections import grpc_channels, grpc_stream
from lp_pipe.connections.chunks import CHUNK_BYTES
from lp_pipe.connections.credentials import RUN_NAME, Credentials, current_credentials, generate_credentials
from lp_pipe.errors import Unauthenticated
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
        tls, options = channels.get(stranger), grpc_channels.CLIENT_OPTIONS
        channel = grpc.secure_channel(target, tls, options) if tls else grpc.insecure_channel(target, options)
        stub = channel.stream_stream(f"/{grpc_channels.SERVICE}/{grpc_channels.METHOD}")
        with channel, pytest.raises(grpc.RpcError) as caught:
            next(stub(iter([call_frame(Mark(tmp_path / "mark"))]), metadata=[("lp-pipe-token", run_credentials.token)]))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert not (tmp_path / "mark").exists()
        assert server.calls == 0


def test_a_client_that_expects_tls_is_told_that_there_is_none(no_leaks: None, open_carrier: OpenCarrier) -> None:
    endpoint = open_carrier("grpc").endpoint
    with pytest.raises(Unauthenticated, match="does not speak TLS"):
        connections.connect(endpoint.replace("grpc:", "grpcs:"))


# Liveness, limits and what they cost.


def test_a_message_over_the_limit_ends_the_connection(tcp: Carrier) -> None:
    limit = [("grpc.max_send_message_length", -1), ("grpc.ssl_target_name_override", RUN_NAME)]
    credentials = current_credentials()
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    target = tcp.endpoint.partition(":")[2]
    is_secure = tcp.endpoint.startswith("grpcs:")
    with grpc.secure_channel(target, tls, limit) if is_secure else grpc.insecure_channel(target, limit) as channel:
        stub = channel.stream_stream(f"/{grpc_channels.SERVICE}/{grpc_channels.METHOD}")
        call = stub(iter([b"x" * (CHUNK_BYTES + 1)]), metadata=[("lp-pipe-token", credentials.token)])
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
            assert "out of reach" in server.reason()
        finally:
            peer.kill()
