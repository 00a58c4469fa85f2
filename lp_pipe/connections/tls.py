"""Connections between two hosts over TLS 1.3, each end with a certificate of the run.

    tls:HOST:PORT         processes that have a certificate of the run, and show its token
    tls:HOST@BIND:PORT    to listen at BIND, where others reach it as HOST

A call takes a third of grpcio's time with the same certificates: the thread that waits for the reply reads it itself.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from lp_pipe.connections import frames, tcp_endpoint, tcp_liveness
from lp_pipe.connections.base import Connection, Listener, OnConnection, OnFrame
from lp_pipe.connections.credentials import ADVICE, RUN_NAME, Credentials, current_credentials
from lp_pipe.connections.frames import Frame, Piece
from lp_pipe.connections.io_thread import TICKS
from lp_pipe.connections.refusals import Refusals
from lp_pipe.connections.resource_limits import describe_rejection
from lp_pipe.connections.socket_connection import SocketConnection
from lp_pipe.connections.socket_reader import SocketReader
from lp_pipe.connections.tcp_endpoint import GONE, TcpEndpoint
from lp_pipe.connections.tls_acceptor import GREETING, MAGIC, TlsAcceptor
from lp_pipe.connections.tls_stream import TlsStream, client_context
from lp_pipe.errors import Unauthenticated, Unavailable

_CONNECT_PATIENCE_S = 5.0
_LINGER_S = 5.0  # for a peer that is slow to read what was sent before the close
_LOOK_AGAIN_S = 0.01  # how often to check whether another thread still reads
_SILENCE_S = 10.0
_DISCARDED_BYTES = 1 << 16


class TlsConnection(SocketConnection):
    """A connection over TLS.

    sock: after handshake and greeting. silence_s: the connection ends when the peer's host has answered nothing for a
        third more than this.
    """

    can_begin_sending = True

    def __init__(self, sock: ssl.SSLSocket, peer: str, silence_s: float, idle_timeout_s: float | None = None) -> None:
        self._stream = TlsStream(sock, None if idle_timeout_s is None else idle_timeout_s / TICKS)
        super().__init__(sock, SocketReader(self._stream), peer, idle_timeout_s)
        self._silence_s = silence_s
        self._silent_end = GONE
        tcp_liveness.shared.watch(sock, silence_s, self._on_silence)

    def wait(self, timeout_s: float | None) -> bool:
        return self._has_decrypted() or super().wait(timeout_s)

    def is_ready(self) -> bool:
        return self._has_decrypted() or super().is_ready()

    def recover(self) -> None:
        self._stream.recover()
        super().recover()

    def is_stuck_here(self) -> bool:
        return super().is_stuck_here() or self._stream.is_inside_here()

    def _has_decrypted(self) -> bool:
        return self._stream.has_decrypted()

    @property
    def sent_bytes(self) -> int:
        return self._stream.sent_bytes

    def begin_sending(self, frame: Frame) -> bool:
        self._send(frames.encode(frame), may_wait=False)
        return not self._stream.has_rest

    def continue_sending(self) -> bool:
        self._send([], may_wait=False)
        return not self._stream.has_rest

    def finish_sending(self) -> None:
        self._send([])

    def _send_pieces(self, pieces: list[Piece], descriptors: Sequence[int] = (), *, may_wait: bool = True) -> None:
        self._stream.send(pieces, may_wait=may_wait)
        self._sent.append(sum(map(len, pieces)))  # the stream has copied what it has not sent yet

    def _limit_sending(self, seconds: float) -> None:
        self._stream.send_timeout_s = seconds

    def _deliver(self, frame: Frame, on_frame: OnFrame) -> None:
        if self._closed_reason is None:  # after the close, reading only lets the peer reach the end
            on_frame(frame)

    def _finish_close(self, reason: str) -> None:
        # Closing a TCP socket with unread data would discard what was sent.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
        if self._mark_closed(reason):
            threading.Thread(target=self._linger, name=f"linger {self.peer}", daemon=True).start()

    def _linger(self) -> None:
        """Wait, for a limited time, until the peer has read all that was sent and has closed as well."""
        deadline = time.monotonic() + _LINGER_S
        while not (is_reader := self.try_reading()) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        if is_reader:
            with contextlib.suppress(OSError):
                self._discard(deadline)
            self._shutdown()
            self._is_over = True
            self.done_reading()
        else:
            self._is_over = True
            self._shutdown()  # the reading thread reaches the end, and does the rest

    def _discard(self, deadline: float) -> None:
        scrap = memoryview(bytearray(_DISCARDED_BYTES))
        while (left_s := deadline - time.monotonic()) > 0:  # `interrupt` may end a wait early
            with contextlib.suppress(BlockingIOError):
                if self.wait(left_s) and not self._stream.recv_into(scrap, 0, socket.MSG_DONTWAIT):
                    return

    def _on_silence(self) -> None:
        # The reason is set before the shutdown, for reads that end inside a frame and for blocked senders.
        self._own_reason = f"its host has answered nothing for {self._silence_s:g} s: it is unreachable"
        self._shutdown()

    def _dispose(self) -> None:
        tcp_liveness.shared.forget(self._socket)
        super()._dispose()


class TlsListener(Listener):
    def __init__(
        self, where: TcpEndpoint, credentials: Credentials, on_connection: OnConnection, silence_s: float
    ) -> None:
        self._on_connection = on_connection
        self._silence_s = silence_s
        listening = _bound(where)
        self.endpoint = str(where._replace(port=listening.getsockname()[1], bind=""))
        self.refusals = Refusals(self.endpoint)
        self._acceptor = TlsAcceptor(listening, credentials, self.refusals, self._let_in)

    def close(self, reason: str = "closed") -> None:
        self._acceptor.close()
        self.refusals.summarize()

    def _let_in(self, sock: ssl.SSLSocket, address: str) -> None:
        connection = TlsConnection(sock, f"client of {self.endpoint} ({address})", self._silence_s)
        try:
            self._on_connection(connection)
        except BaseException as error:
            connection.close(describe_rejection(error))
            raise


def listen(
    endpoint: str, on_connection: OnConnection, credentials: Credentials | None = None, silence_s: float = _SILENCE_S
) -> Listener:
    """Accept connections from processes of this run; with port 0, the listener's `endpoint` has the chosen port.

    credentials, silence_s: as for `connect`.

    Raises:
        ValueError: it is no endpoint.
        Unauthenticated: this process has no credentials.
        OSError: the address cannot be bound.
    """
    return TlsListener(tcp_endpoint.parse(endpoint), credentials or current_credentials(), on_connection, silence_s)


def connect(
    endpoint: str,
    idle_timeout_s: float | None = None,
    credentials: Credentials | None = None,
    silence_s: float = _SILENCE_S,
) -> Connection:
    """Connect to a listener of a process of this run, on any host.

    credentials: of the run; None: those of this process (use_credentials).
    silence_s: the connection ends when the peer's host has acknowledged nothing for a fifth to a third more than this.

    Raises:
        Unavailable: nothing listens there, or there is no answer within 5 s.
        Unauthenticated: the listener is not of this run, or does not accept this process as one of it.
    """
    where = tcp_endpoint.parse_to_connect(endpoint)
    credentials = credentials or current_credentials()
    deadline = time.monotonic() + _CONNECT_PATIENCE_S
    try:
        sock = socket.create_connection((where.host, where.port), timeout=_CONNECT_PATIENCE_S)
    except OSError as error:
        what = "cannot reach" if tcp_liveness.is_unreachable(error) else "nothing listens at"
        raise Unavailable(f"{what} {endpoint}: {error.strerror or error}") from error
    return TlsConnection(_greeted(sock, endpoint, credentials, deadline), endpoint, silence_s, idle_timeout_s)


def _greeted(sock: socket.socket, endpoint: str, credentials: Credentials, deadline: float) -> ssl.SSLSocket:
    """Complete the handshake, show this process's token, and check that the listener accepts it."""
    with contextlib.ExitStack() as unless_welcome:
        unless_welcome.callback(sock.close)  # a socket that was reset already cannot be wrapped
        try:
            found = client_context(credentials).wrap_socket(
                sock, server_hostname=RUN_NAME, do_handshake_on_connect=False
            )
            unless_welcome.callback(found.close)
            refusal = _greet(found, credentials, deadline)
        except OSError as error:
            raise _no_greeting(endpoint, error) from error
        if refusal:
            raise Unauthenticated(f"{endpoint} refused this process: {refusal}; {ADVICE}")
        unless_welcome.pop_all()
    return found


def _greet(sock: ssl.SSLSocket, credentials: Credentials, deadline: float) -> str:
    """Return why the listener does not accept this process; "" if it does."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _set_timeout(sock, deadline)
    sock.do_handshake()
    token = credentials.token.encode()
    sock.sendall(GREETING.pack(MAGIC, len(token)) + token)
    _, length = GREETING.unpack(_read(sock, GREETING.size, deadline))
    return _read(sock, length, deadline).decode(errors="replace")


def _read(sock: ssl.SSLSocket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        _set_timeout(sock, deadline)
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError("end of the stream")
        data += part
    return data


def _set_timeout(sock: socket.socket, deadline: float) -> None:
    sock.settimeout(max(0.001, deadline - time.monotonic()))


def _no_greeting(endpoint: str, error: OSError) -> Unavailable:
    if isinstance(error, ssl.SSLError):
        if error.reason and "ALERT" in error.reason:
            return Unauthenticated(f"{endpoint} refused this process: {error.reason}; {ADVICE}")
        return Unauthenticated(
            f"{endpoint} is not of this run, or does not speak TLS: {error.reason or error}; {ADVICE}"
        )
    if isinstance(error, TimeoutError):
        return Unavailable(f"{endpoint} did not answer within {_CONNECT_PATIENCE_S:g} s")
    why = f"it has just ended, or does not accept this process as one of its run ({ADVICE})"
    return Unavailable(f"{endpoint} closed the connection before it began: {why}: {error}")


def _bound(where: TcpEndpoint) -> socket.socket:
    host, port = where.bind or where.host, where.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=takes_both)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot listen at {where} ({where.bind_target}): {error.strerror or error}"
        ) from error
