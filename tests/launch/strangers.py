"""An attacker at a listening port: with and without TLS, the run's certificate, its token."""

import contextlib
import os
import pickle
import random
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from lp_pipe.connections import Frame, frames
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.tls_acceptor import GREETING, MAGIC

WITHIN_S = 20.0
AT_A_TIME = 100


class Bomb:
    """An object that makes a file when any process unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def call_with_bomb(path: Path, method: str) -> bytes:
    """The frame of a call of a server's method, whose arguments explode when they are read."""
    return b"".join(frames.encode(Frame(frames.CALL, 1, method, pickle.dumps(((Bomb(path),), {})))))


def ports_of(pids: Iterable[int]) -> list[int]:
    """Return the ports at which these processes listen by TCP, at any address."""
    return [
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def throw(port: int, strings: Iterable[bytes]) -> int:
    """Connect, send one string, wait to be thrown out: for each; returns how many bytes were answered at most."""
    longest, waiting = 0, iter(strings)
    while batch := [data for data, _ in zip(waiting, range(AT_A_TIME), strict=False)]:
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(socket.create_connection(("127.0.0.1", port), WITHIN_S)) for _ in batch]
            for sock, data in zip(socks, batch, strict=True):
                with contextlib.suppress(ConnectionError):
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
            longest = max([longest, *map(_answered, socks)])
    return longest


def _answered(sock: socket.socket) -> int:
    """Bytes until the other side ends the connection.

    Raises:
        TimeoutError: it does not.
    """
    total = 0
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            total += len(data)
    return total


def random_strings(count: int, seed: int) -> Iterator[bytes]:
    """Yield bytes of any length up to some thousand; some begin like TLS, HTTP/2, or a frame."""
    source = random.Random(seed)
    beginnings = [
        b"",
        b"",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x14\0\0\0",
    ]
    for _ in range(count):
        yield source.choice(beginnings) + source.randbytes(int(source.paretovariate(0.5)) % 5000)


def tls_context(shown: Credentials | None) -> ssl.SSLContext:
    """Return a client's context that trusts any server, and shows this certificate, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shown is not None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(shown.key + shown.certificate)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def client_hello() -> bytes:
    """The first bytes of a TLS handshake."""
    outgoing = ssl.MemoryBIO()
    tls = tls_context(None).wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@contextlib.contextmanager
def held_open(port: int, count: int, beginning: bytes) -> Iterator[list[socket.socket]]:
    """Hold so many connections open that send a beginning and nothing more; some may be closed by the listener."""
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(count):
            socks.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), WITHIN_S)))
            with contextlib.suppress(ConnectionError):
                socks[-1].sendall(beginning)
        yield socks


def through_tls(port: int, shown: Credentials | None, data: bytes) -> bytes:
    """Send bytes inside TLS; what came back first, b"" where the connection was refused."""
    with (
        contextlib.suppress(ConnectionError, ssl.SSLError),
        socket.create_connection(("127.0.0.1", port), WITHIN_S) as sock,
        tls_context(shown).wrap_socket(sock) as tls,
    ):
        tls.sendall(data)
        return tls.recv(1 << 16)
    return b""


class Stream:
    """The stream under a connection, opened with any credentials: sends `data`, then stays open."""

    def __init__(self, port: int, shown: Credentials, data: bytes, token: str | None = None) -> None:
        shown_token = (shown.token if token is None else token).encode()
        self._bare = socket.create_connection(("127.0.0.1", port), WITHIN_S)
        self._tls: ssl.SSLSocket | None = None
        with contextlib.suppress(OSError):  # then `is_welcome` is False
            self._tls = tls_context(shown).wrap_socket(self._bare)
            self._tls.sendall(GREETING.pack(MAGIC, len(shown_token)) + shown_token + data)

    def is_welcome(self) -> bool:
        """Wait for the answer to the greeting."""
        return self._received(GREETING.size) == GREETING.pack(MAGIC, 0)

    def end(self) -> bytes:
        """Wait until the other side ends it: what it had sent."""
        said = b""
        while data := self._received(1 << 16):
            said += data
        return said

    def _received(self, size: int) -> bytes:
        """Return what arrives on a connection until it is refused; raise TimeoutError when nothing comes at all."""
        try:
            return self._tls.recv(size) if self._tls is not None else b""
        except TimeoutError:
            raise
        except OSError:
            return b""

    def close(self) -> None:
        (self._tls or self._bare).close()


def secrets_in(text: bytes, ours: Credentials) -> bool:
    """Return whether the token, or a line of the key, is there in any form in which they travel."""
    import base64

    key_lines = [line for line in ours.key.splitlines() if not line.startswith(b"-")]
    parts = [ours.token.encode(), *key_lines, base64.b64encode(ours.key)[:60]]
    return any(part in text for part in parts)


def proc_texts(pids: Iterable[int]) -> Iterator[bytes]:
    """Arguments and environment of processes, as every process of their user can read them."""
    for pid in pids:
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                yield Path(f"/proc/{pid}/{name}").read_bytes()


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
