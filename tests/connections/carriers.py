"""Listeners and connections of one kind, for tests that hold for every kind."""

import queue
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc

from lp_pipe import connections
from lp_pipe.connections import Connection, Frame, frames, grpc_channels, tcp_endpoint, tls
from lp_pipe.connections.credentials import current_credentials, token_credentials

WITHIN_S = 20.0


def own_loopback() -> str:
    """A loopback address that no other test has: a port that is free there stays free."""
    return ".".join(["127", *(str(random.randrange(1, 255)) for _ in range(3))])


class End:
    """One end of a connection, and what has arrived there."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.frames: queue.Queue[Frame] = queue.Queue()
        self.reasons: queue.Queue[str] = queue.Queue()

    def start(self) -> "End":
        self.connection.start(self.frames.put, self.reasons.put)
        return self

    def next(self) -> Frame:
        return self.frames.get(timeout=WITHIN_S)

    def reason(self) -> str:
        return self.reasons.get(timeout=WITHIN_S)


class Carrier:
    """Makes connections of one kind ("unix", "grpc"), and closes all at the end."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.is_tcp = f"{kind}:" in tcp_endpoint.SCHEMES
        self.accepted: queue.Queue[Connection] = queue.Queue()
        self._made: list[Connection] = []
        self.host = own_loopback()
        self._taken_port = socket.socket()
        self._taken_port.bind((self.host, 0))
        where = f"{self.host}:0" if self.is_tcp else f"{folder}/test"
        self.listener = connections.listen(f"{kind}:{where}", self.take)
        self.endpoint = self.listener.endpoint
        port = self._taken_port.getsockname()[1]
        self.nowhere = f"{kind}:{self.host}:{port}" if self.is_tcp else f"{self.endpoint}-other"

    def take(self, connection: Connection) -> None:
        self._made.append(connection)
        self.accepted.put(connection)

    def accept(self) -> End:
        """The other end of the next connection, not started."""
        return End(self.accepted.get(timeout=WITHIN_S))

    def connect(self, idle_timeout_s: float | None = None) -> End:
        connection = connections.connect(self.endpoint, idle_timeout_s)
        self._made.append(connection)
        return End(connection)

    def pair(self) -> tuple[End, End]:
        """Two ends, not started."""
        return self.connect(), self.accept()

    def send_raw(self, data: bytes) -> Callable[[], object]:
        """Send bytes as an authenticated peer that may be no lp_pipe, and nothing more; returns what closes it."""
        if self.endpoint.startswith(tcp_endpoint.TLS):
            stranger = raw_tls(self.endpoint)
            stranger.sendall(data)
            socket.socket.shutdown(stranger, socket.SHUT_WR)
            return stranger.close
        if self.is_tcp:
            return self._send_raw_message(data)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self.endpoint.removeprefix("unix:"))
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return sock.close

    def _send_raw_message(self, data: bytes) -> Callable[[], object]:
        channel, call = raw_stream(self.endpoint, [data], current_credentials().token)
        call.initial_metadata()
        return lambda: (call.cancel(), channel.close())  # a stream that nobody holds is cancelled

    def close(self) -> None:
        self.listener.close()
        self._taken_port.close()
        for connection in self._made:
            connection.close()


OpenCarrier = Callable[[str], Carrier]


def assert_works(carrier: Carrier) -> None:
    client, server = carrier.pair()
    client.start()
    server.start()
    client.connection.send(Frame(frames.CALL, 1))
    assert server.next().id == 1


def raw_tls(endpoint: str) -> ssl.SSLSocket:
    """The stream under a connection, after the greeting."""
    where = tcp_endpoint.parse(endpoint)
    sock = socket.create_connection((where.host, where.port), timeout=WITHIN_S)
    return tls._greeted(sock, endpoint, current_credentials(), time.monotonic() + WITHIN_S)


def raw_stream(endpoint: str, messages: Iterable[bytes], token: str | None) -> tuple[grpc.Channel, grpc.Call]:
    """The stream under a connection, with any messages."""
    where = tcp_endpoint.parse(endpoint)
    channel = grpc_channels.open_channel(where, current_credentials())
    stub = channel.stream_stream(f"/{grpc_channels.SERVICE}/{grpc_channels.METHOD}")
    said = grpc_channels.greeting(token_credentials(token), where.port) if token is not None else {}
    return channel, stub(iter(messages), metadata=list(said.items()))
