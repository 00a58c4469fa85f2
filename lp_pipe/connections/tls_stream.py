"""TLS 1.3 over a TCP socket that several threads use: one may read while another sends."""

import contextlib
import functools
import os
import select
import socket
import ssl
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.frames import Piece
from lp_pipe.connections.kernel_calls import has_memfd
from lp_pipe.private_python import is_held_here, release_if_held_here

_RECORD_BYTES = 1 << 14  # the most that TLS encrypts at a time
_SLICE_BYTES = 1 << 18  # reading waits while this much is encrypted
_HANG_UP = select.POLLHUP | select.POLLERR


class TlsStream:
    """A TLS socket that reads and sends like a blocking one.

    OpenSSL lets one thread at a time into a connection, so no thread waits inside OpenSSL.

    sock: connected, after the handshake. idle_timeout_s: a read that waits for longer raises TimeoutError.
    """

    def __init__(self, sock: ssl.SSLSocket, idle_timeout_s: float | None = None) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._inside = threading.RLock()
        self._idle_timeout_s = idle_timeout_s
        self.send_timeout_s: float | None = None
        self.sent_bytes = 0
        self._rest: deque[memoryview] = deque()

    def is_inside_here(self) -> bool:
        """Return whether the calling thread was interrupted inside OpenSSL, in a read or a write."""
        return is_held_here(self._inside)

    def recover(self) -> None:
        """Release the lock if an exception interrupted the calling thread while it held it."""
        release_if_held_here(self._inside)

    def has_decrypted(self) -> bool:
        """Return whether there is something to read that the kernel does not know of."""
        return self._socket.pending() > 0

    def recv_into(self, target: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """Read like a socket's recv_into, but as much as is there and fits; 0 at the end.

        Raises:
            BlockingIOError: nothing is there (with MSG_DONTWAIT).
            TimeoutError: nothing arrived for `idle_timeout_s`.
            OSError: the connection is broken.
        """
        count = self._read(target)
        if count is None and not flags & socket.MSG_DONTWAIT:
            count = self._read_later(target)
        if count is None:
            raise BlockingIOError
        with contextlib.suppress(OSError):  # the next read raises it again
            while 0 < count < len(target) and (more := self._read(target[count:])):
                count += more
        return count

    @property
    def has_rest(self) -> bool:
        """Whether `send` with may_wait=False has left a rest."""
        return bool(self._rest)

    def send(self, pieces: Sequence[Piece], *, may_wait: bool) -> None:
        """Send the rest of before and all of these pieces.

        may_wait: block until the kernel has all, or took nothing for `send_timeout_s`; if False, never block, and keep
            the rest.

        Raises:
            OSError: the connection is broken, or has taken nothing for too long.
        """
        self._rest.extend(map(memoryview, _joined(pieces)))
        while self._rest:
            count = self._write(self._rest[0][:_SLICE_BYTES], may_wait=may_wait)
            if count is None:
                return
            self.sent_bytes += count
            self._rest[0] = self._rest[0][count:]
            if not self._rest[0]:
                self._rest.popleft()

    def _read_later(self, target: memoryview) -> int | None:
        while True:
            is_there = _wait(self._socket, select.POLLIN, self._idle_timeout_s)
            # A process that was frozen finds that the time is over, and perhaps data as well.
            count = self._read(target)
            if count is not None:
                return count
            if not is_there:
                raise TimeoutError

    def _read(self, target: memoryview) -> int | None:
        """Read at most one record; None when nothing is there."""
        try:
            with self._inside:
                return self._socket.read(len(target), target)  # type: ignore[return-value]  # with a buffer: how many
        except ssl.SSLWantReadError:
            return None

    def _write(self, data: memoryview, *, may_wait: bool) -> int | None:
        """Return the bytes written, or None when there is no room.

        After None, the next call must be with the same data, which OpenSSL has begun to write.
        """
        while True:
            try:
                with self._inside:
                    return self._socket.send(data)
            except ssl.SSLWantWriteError:
                if not may_wait:
                    return None
                if not _wait(self._socket, select.POLLOUT, self.send_timeout_s):
                    raise TimeoutError("the peer does not read") from None


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the context for listeners: clients must have a certificate of the run."""
    return _contexts(credentials)[0]


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the context for clients, to use with server_hostname=RUN_NAME."""
    return _contexts(credentials)[1]


@functools.lru_cache(maxsize=8)
def _contexts(credentials: Credentials) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=credentials.authority.decode())
        _load_certificate(context, credentials)
    server.num_tickets = 0  # no client resumes a session
    return server, client


def _load_certificate(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Load the certificate through a file, which the ssl module needs: in memory, and readable by this user only."""
    if has_memfd() and os.path.isdir("/proc/self/fd"):
        with open(os.memfd_create("lp_pipe-certificate", os.MFD_CLOEXEC), "wb") as file:
            file.write(credentials.certificate + credentials.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    else:
        with tempfile.NamedTemporaryFile() as file:  # of mode 0600
            file.write(credentials.certificate + credentials.key)
            file.flush()
            context.load_cert_chain(file.name)


def _wait(sock: socket.socket, event: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(sock, event | _HANG_UP)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield small neighbours as one piece of up to a record, so that they arrive together and wake the reader once."""
    small: list[Piece] = []
    room = _RECORD_BYTES
    for piece in pieces:
        if len(piece) <= room:
            small.append(piece)
            room -= len(piece)
            continue
        view = memoryview(piece)
        small.append(view[:room])
        yield b"".join(small)
        rest = view[room:]
        small, room = [], _RECORD_BYTES
        if len(rest) <= room:
            small, room = [rest], room - len(rest)
        else:
            yield rest
    if small:
        yield b"".join(small)
