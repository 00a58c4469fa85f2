"""The gRPC channels and servers below connections: their limits, pings and credentials."""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import grpc

from lp_pipe.connections import port_tokens
from lp_pipe.connections.chunks import CHUNK_BYTES
from lp_pipe.connections.credentials import RUN_NAME, Credentials, current_credentials, token_credentials
from lp_pipe.connections.resource_limits import check_descriptors
from lp_pipe.connections.tcp_endpoint import TcpEndpoint
from lp_pipe.errors import Unauthenticated, Unavailable

SERVICE, METHOD = "lp_pipe.ConnectionService", "Connect"
# A client sends a random number and a proof that it knows the token; the listener's welcome is a proof too. The token
# itself is never sent: another user may listen at a port after its listener has ended. Each proof is for one port, or
# that user could pass a client's proof on to another listener of the run.
NONCE, SHOWN, WELCOME = "lp-pipe-nonce", "lp-pipe-shown", "lp-pipe-welcome"
SILENCE_S = 10.0
# The launcher declares a host lost after this silence, or a quarter more; the host's peers must notice it later than
# that.
_ANSWER_SHARE, _PAUSE_SHARE = 1.2, 0.125
_DESCRIPTORS = 16  # gRPC ends the process when it finds none for its first channel
_PUBLISH_LIMIT_S = 1.0  # a server publishes its token right after it begins to listen
_HANDSHAKE_MS = 10_000  # for TLS and the first HTTP/2 frames; gRPC's own limit is two minutes

_OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_send_message_length", CHUNK_BYTES),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.http2.max_ping_strikes", 0),  # a listener accepts any number of pings: a stalled stream has nothing else
    ("grpc.http2.lookahead_bytes", 4 * CHUNK_BYTES),
    ("grpc.http2.max_frame_size", CHUNK_BYTES + 1024),  # a chunk in one HTTP/2 frame; by default it takes 16 KiB
]
CLIENT_OPTIONS = [
    *_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one listener share a TCP connection
    ("grpc.enable_retries", 0),  # retries keep a copy of what was sent
    ("grpc.min_reconnect_backoff_ms", 5000),  # the time limit of connecting
    ("grpc.enable_http_proxy", 0),
    ("grpc.ssl_target_name_override", RUN_NAME),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),  # else two listeners could share a port
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", _HANDSHAKE_MS),  # for clients that have no open stream
]


def credentials_for(where: TcpEndpoint) -> Credentials:
    """Return the credentials of the endpoint's own token if it has one, else this process's."""
    return token_credentials(where.token) if where.token else current_credentials()


def credentials_to_connect(where: TcpEndpoint) -> Credentials:
    """Return the credentials for a listener elsewhere: of a plain endpoint those that its process has published.

    Raises:
        Unavailable: nothing listens there.
        Unauthenticated: the listener has published no token, and this process has no credentials of a run.
    """
    if where.token or where.is_secure:
        return credentials_for(where)
    published = port_tokens.find(where.port)
    if not published:
        try:
            return current_credentials()
        except Unauthenticated as error:
            published = _token_of_starting_server(where)
            if not published:
                raise Unauthenticated(f"no process of this user serves at {where}, and {error}") from error
    return token_credentials(published)


def _token_of_starting_server(where: TcpEndpoint) -> str:
    """Wait a moment for the token of a server that has just begun to listen; "" if it publishes none.

    Raises:
        Unavailable: nothing listens there.
    """
    try:
        socket.create_connection((where.host, where.port), _PUBLISH_LIMIT_S).close()
    except OSError as error:
        raise Unavailable(f"nothing listens at {where}: {error.strerror or error}") from error
    deadline = time.monotonic() + _PUBLISH_LIMIT_S
    while not (token := port_tokens.find(where.port)) and time.monotonic() < deadline:
        time.sleep(_PUBLISH_LIMIT_S / 20)
    return token


def greeting(credentials: Credentials, port: int) -> dict[str, str]:
    """Return the metadata that a client sends first to a listener with these credentials at that port."""
    nonce = secrets.token_hex(16)
    return {NONCE: nonce, SHOWN: credentials.proof(client_of(port), nonce)}


def client_of(port: int) -> str:
    """Return the name under which a client of that port makes its proof."""
    return f"client of {port}"


def listener_at(port: int) -> str:
    """Return the name under which the listener at that port makes its proof."""
    return f"listener at {port}"


def open_channel(where: TcpEndpoint, credentials: Credentials, silence_s: float = SILENCE_S) -> grpc.Channel:
    """Return a channel with a TCP connection of its own, which opens with the first stream.

    Raises:
        OSError: too few descriptors are left.
    """
    check_descriptors(_DESCRIPTORS)
    options = [*CLIENT_OPTIONS, *_pings(silence_s)]
    if not where.is_secure:
        return grpc.insecure_channel(where.target, options=options)
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return grpc.secure_channel(where.target, tls, options=options)


def new_server(executor: Executor, silence_s: float) -> grpc.Server:
    """Return a server; `executor` runs its streams."""
    return grpc.server(executor, options=[*_SERVER_OPTIONS, *_pings(silence_s)])


def bind(server: grpc.Server, where: TcpEndpoint, credentials: Credentials) -> int:
    """Make the server listen there, and return the port.

    Raises:
        OSError: the address cannot be bound.
    """
    try:
        if not where.is_secure:
            return int(server.add_insecure_port(where.bind_target))
        pair = (credentials.key, credentials.certificate)
        tls = grpc.ssl_server_credentials([pair], credentials.authority, require_client_auth=True)
        return int(server.add_secure_port(where.bind_target, tls))
    except RuntimeError as error:
        raise OSError(f"cannot listen at {where} ({where.bind_target}): {error}") from error


def _pings(silence_s: float) -> list[tuple[str, int]]:
    answer_ms = round(silence_s * _ANSWER_SHARE * 1000)
    return [
        ("grpc.keepalive_time_ms", round(silence_s * _PAUSE_SHARE * 1000)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # 60 s by default, whatever the line above says (grpc 1.85)
    ]


class ThreadPerCall(Executor):
    """An executor for gRPC's server that starts a daemon thread for each stream.

    A stream occupies its thread for as long as it lives, so no fixed number of threads would do.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # belongs to gRPC, which asks the future
                future.set_exception(error)

        try:
            threading.Thread(target=run, name="grpc stream", daemon=True).start()
        except RuntimeError as error:  # out of threads; raised here it would end gRPC's accepting thread
            future.set_exception(error)
            self._on_failure(error)
        return future
