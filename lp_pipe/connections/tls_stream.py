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
from lp_pipe.connections.thread_locks import release_if_held_here
from lp_pipe.private_python import is_held_here

_RECORD_BYTES = 1 << 14  # TLS encrypts so much at a time
_SLICE_BYTES = 1 << 18  # reading waits while so much is being encrypted
_HANG_UP = select.POLLHUP | select.POLLERR


class TlsStream:
    """Reads and sends like a blocking socket.

    OpenSSL lets one thread at a time into a connection, so none waits inside.

    sock: connected, after the handshake. idle_timeout_s: a read that waits for longer is a TimeoutError.
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
        """Whether the calling thread was interrupted inside of OpenSSL's part of a read or a write."""
        return is_held_here(self._inside)

    def recover(self) -> None:
        """Give back the lock, where an exception has interrupted the calling thread between two bytecodes."""
        release_if_held_here(self._inside)

    def has_decrypted(self) -> bool:
        """Whether there is something to read that the kernel does not know of."""
        return self._socket.pending() > 0

    def recv_into(self, target: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """As a socket's, but what is there is read as far as it fits; 0 at the end.

        Raises:
            BlockingIOError: nothing is there (with MSG_DONTWAIT).
            TimeoutError: nothing came for `idle_timeout_s`.
            OSError: the connection is broken.
        """
        count = self._read(target)
        if count is None and not flags & socket.MSG_DONTWAIT:
            count = self._read_later(target)
        if count is None:
            raise BlockingIOError
        with contextlib.suppress(OSError):  # the next read says so
            while 0 < count < len(target) and (more := self._read(target[count:])):
                count += more
        return count

    @property
    def has_rest(self) -> bool:
        """Whether `send` has left something, because it was not to wait."""
        return bool(self._rest)

    def send(self, pieces: Sequence[Piece], *, may_wait: bool) -> None:
        """Block until the kernel has the rest and all of these, or nothing for `send_timeout_s`; or never block.

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
            # A process that was frozen finds that time is over, and perhaps data as well.
            count = self._read(target)
            if count is not None:
                return count
            if not is_there:
                raise TimeoutError

    def _read(self, target: memoryview) -> int | None:
        """At most one record; None when nothing is there."""
        try:
            with self._inside:
                return self._socket.read(len(target), target)  # type: ignore[return-value]  # with a buffer: how many
        except ssl.SSLWantReadError:
            return None

    def _write(self, data: memoryview, *, may_wait: bool) -> int | None:
        """None when there is no room: then the next call must be with the same data, with which OpenSSL has begun."""
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
    """For listeners: clients must have a certificate of the run."""
    return _contexts(credentials)[0]


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """For those who connect, with server_hostname=RUN_NAME."""
    return _contexts(credentials)[1]


@functools.lru_cache(maxsize=8)
def _contexts(credentials: Credentials) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=credentials.authority.decode())
        _load_certificate(context, credentials)
    server.num_tickets = 0  # nobody comes again with one
    return server, client


def _load_certificate(context: ssl.SSLContext, credentials: Credentials) -> None:
    """The ssl module takes a file only: this one is in memory, and nobody else's."""
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
    """Small neighbours as one, up to a record: what belongs together arrives together, and wakes its reader once."""
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
