"""The channels and servers under connections by gRPC: their limits, pings and credentials."""

import secrets
from concurrent.futures import Executor

import grpc

from lp_pipe.connections.chunks import CHUNK_BYTES
from lp_pipe.connections.credentials import RUN_NAME, Credentials, current_credentials, only_token
from lp_pipe.connections.shortage import check_descriptors
from lp_pipe.connections.tcp_endpoint import TcpEndpoint

SERVICE, METHOD = "lp_pipe.ConnectionService", "Connect"
# A client says a random number, and shows that it knows the token; the listener's welcome shows the same. The token
# itself stays where it is: at a port whose listener has ended another user may listen by now. Each proof is for one
# port, or he could pass a client's on to another listener of the run.
NONCE, SHOWN, WELCOME = "lp-pipe-nonce", "lp-pipe-shown", "lp-pipe-welcome"
SILENCE_S = 10.0
# The launcher says a host lost that is silent for so long, or a quarter more; its peers are to notice it after that.
_ANSWER_SHARE, _PAUSE_SHARE = 1.2, 0.125
_DESCRIPTORS = 16  # where gRPC finds none for its first channel, the process ends
_HANDSHAKE_MS = 10_000  # for TLS and HTTP/2's first words; gRPC's own limit is two minutes

_OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_send_message_length", CHUNK_BYTES),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.http2.max_ping_strikes", 0),  # a listener never takes offence at pings: a stalled stream has nothing else
    ("grpc.http2.lookahead_bytes", 4 * CHUNK_BYTES),
    ("grpc.http2.max_frame_size", CHUNK_BYTES + 1024),  # a chunk in one HTTP/2 frame; by default it takes 16 KiB
]
CLIENT_OPTIONS = [
    *_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one listener share a TCP connection
    ("grpc.enable_retries", 0),  # they keep a copy of what was sent
    ("grpc.min_reconnect_backoff_ms", 5000),  # the time limit of connecting
    ("grpc.enable_http_proxy", 0),
    ("grpc.ssl_target_name_override", RUN_NAME),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),  # else two listeners could share a port
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", _HANDSHAKE_MS),  # who opens no stream, or has none any more
]


def credentials_for(where: TcpEndpoint) -> Credentials:
    """What the endpoint itself says, or this process's."""
    return only_token(where.token) if where.token else current_credentials()


def greeting(credentials: Credentials, port: int) -> dict[str, str]:
    """What a client says first, for a listener with these credentials at that port."""
    nonce = secrets.token_hex(16)
    return {NONCE: nonce, SHOWN: credentials.proof(client_of(port), nonce)}


def client_of(port: int) -> str:
    """Whose proof a client's is."""
    return f"client of {port}"


def listener_at(port: int) -> str:
    """Whose proof a listener's is."""
    return f"listener at {port}"


def open_channel(where: TcpEndpoint, credentials: Credentials, silence_s: float = SILENCE_S) -> grpc.Channel:
    """A channel with a TCP connection of its own, which begins with the first stream.

    Raises:
        OSError: there are too few descriptors left.
    """
    check_descriptors(_DESCRIPTORS)
    options = [*CLIENT_OPTIONS, *_pings(silence_s)]
    if not where.is_secure:
        return grpc.insecure_channel(where.target, options=options)
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return grpc.secure_channel(where.target, tls, options=options)


def new_server(executor: Executor, silence_s: float) -> grpc.Server:
    """executor: runs the streams."""
    return grpc.server(executor, options=[*_SERVER_OPTIONS, *_pings(silence_s)])


def bind(server: grpc.Server, where: TcpEndpoint, credentials: Credentials) -> int:
    """Let the server listen there; returns the port.

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
        ("grpc.http2.ping_timeout_ms", answer_ms),  # 60 s if left alone, whatever the line above says (grpc 1.85)
    ]
