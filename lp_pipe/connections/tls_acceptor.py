"""A thread that completes TLS handshakes and checks tokens, without being held up by slow or hostile peers."""

import contextlib
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.fork_isolation import close_in_children
from lp_pipe.connections.kernel_calls import most_descriptors, new_selector
from lp_pipe.connections.refusals import Refusals
from lp_pipe.connections.resource_limits import describe_rejection
from lp_pipe.connections.tls_stream import server_context

# The client sends first: magic, length of the token, token. The answer: magic, length of the refusal (0: accepted),
# refusal.
GREETING = struct.Struct("<4s H")
MAGIC = b"LPT1"

_MAX_TOKEN_BYTES = 1024
_HANDSHAKE_LIMIT_S = 10.0
_MAX_HANDSHAKES = 1024  # at a time; one more makes the oldest one drop
_DESCRIPTORS_SHARE = 4  # and they may use at most this part of the descriptors that the process may open
_ACCEPT_PAUSE_S = 0.1
_DISCARDED_BYTES = 1 << 16

_Steps = Generator[int, None, None]


class TlsAcceptor:
    """Accepts connections at `listening` until it is closed.

    on_accepted: called with the socket and the address of each authenticated peer; must not block.
    """

    def __init__(
        self,
        listening: socket.socket,
        credentials: Credentials,
        refusals: Refusals,
        on_accepted: Callable[[ssl.SSLSocket, str], object],
    ) -> None:
        self._listening = listening
        close_in_children(listening)
        self._credentials = credentials
        self._context = server_context(credentials)
        self._refusals = refusals
        self._on_accepted = on_accepted
        self._handshakes: dict[ssl.SSLSocket, _Handshake] = {}  # oldest first
        self._selector = new_selector()
        self._closing, self._close = os.pipe()
        self._closing_lock = threading.Lock()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"accept {listening.getsockname()[:2]}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and drop the peers with an incomplete handshake."""
        with self._closing_lock:
            if self._close >= 0:
                os.write(self._close, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._selector, self._listening:
            while True:
                for key, _ in self._selector.select(self._next_timeout_s()):
                    if key.fileobj == self._closing:
                        self._end()
                        return
                    if key.fileobj is self._listening:
                        self._accept()
                    else:
                        self._advance(key.data)
                self._drop_late_handshakes()

    def _end(self) -> None:
        for handshake in list(self._handshakes.values()):
            self._drop(handshake)
        with self._closing_lock:
            os.close(self._closing)
            os.close(self._close)
            self._close = -1

    def _accept(self) -> None:
        try:
            sock, address = self._listening.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError | ConnectionError):
                self._refusals.keep_waiting(error)
                time.sleep(_ACCEPT_PAUSE_S)  # out of file descriptors; some may be free later
            return
        self._refusals.go_on()
        where = f"{address[0]}:{address[1]}"
        try:
            tls_sock = self._wrapped(sock)
        except OSError as error:  # the peer has reset the connection, which cannot be wrapped then
            sock.close()
            self._refusals.note(where, str(error))
            return
        if len(self._handshakes) >= min(_MAX_HANDSHAKES, most_descriptors() // _DESCRIPTORS_SHARE):
            self._drop(next(iter(self._handshakes.values())), "too many handshakes were in progress")
        handshake = _Handshake(tls_sock, where, self._credentials)
        self._handshakes[tls_sock] = handshake
        self._selector.register(tls_sock, selectors.EVENT_READ, handshake)
        self._advance(handshake)

    def _wrapped(self, sock: socket.socket) -> ssl.SSLSocket:
        sock.getpeername()  # raises if the connection was reset; the ssl module would not close the socket
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _advance(self, handshake: "_Handshake") -> None:
        if handshake.sock not in self._handshakes:
            return  # dropped in this very round
        try:
            event = next(handshake.steps)
        except StopIteration:
            self._forget(handshake)
            self._hand_over(handshake)
        except (OSError, _RefusedError) as error:
            if handshake.is_refused:
                self._drop(handshake)
                return
            self._refusals.note(handshake.address, str(error))
            handshake.refuse()
            self._advance(handshake)
        else:
            self._selector.modify(handshake.sock, event, handshake)

    def _hand_over(self, handshake: "_Handshake") -> None:
        try:
            self._on_accepted(handshake.sock, handshake.address)
        except Exception as error:  # out of descriptors or threads; a later peer may find some
            self._refusals.note(handshake.address, describe_rejection(error))

    def _next_timeout_s(self) -> float | None:
        for handshake in self._handshakes.values():
            return max(0.0, handshake.deadline - time.monotonic())
        return None

    def _drop_late_handshakes(self) -> None:
        for handshake in list(self._handshakes.values()):
            if handshake.deadline > time.monotonic():
                return
            self._drop(handshake, f"its handshake took more than {_HANDSHAKE_LIMIT_S:g} s")

    def _drop(self, handshake: "_Handshake", why: str = "") -> None:
        if why and not handshake.is_refused:
            self._refusals.note(handshake.address, why)
        self._forget(handshake)
        handshake.sock.close()

    def _forget(self, handshake: "_Handshake") -> None:
        del self._handshakes[handshake.sock]
        self._selector.unregister(handshake.sock)


class _RefusedError(Exception):
    """The reason for which a peer is not accepted."""


class _Handshake:
    """A peer that is not accepted yet, or was refused. `steps` is a generator that yields each event it waits for."""

    def __init__(self, sock: ssl.SSLSocket, address: str, credentials: Credentials) -> None:
        self.sock = sock
        self.address = address
        self.deadline = time.monotonic() + _HANDSHAKE_LIMIT_S
        self.is_refused = False
        self.steps = self._authenticate()
        self._credentials = credentials

    def refuse(self) -> None:
        """Let the peer read the refusal: discard its bytes, since closing with unread bytes loses the answer."""
        self.is_refused = True
        self.steps = self._drain_after_refusal()

    def _authenticate(self) -> _Steps:
        yield from self._try(self.sock.do_handshake)
        magic, length = GREETING.unpack((yield from self._read(GREETING.size)))
        if magic != MAGIC or length > _MAX_TOKEN_BYTES:
            raise _RefusedError("it does not speak this version's protocol")
        token = yield from self._read(length)
        refusal = "" if self._credentials.is_token(token) else f"showed {'a wrong' if token else 'no'} token"
        answer = f"the peer {refusal}".encode() if refusal else b""
        yield from self._try(self.sock.send, GREETING.pack(MAGIC, len(answer)) + answer)
        if refusal:
            raise _RefusedError(f"it {refusal}")

    def _drain_after_refusal(self) -> _Steps:
        socket.socket.shutdown(self.sock, socket.SHUT_WR)
        while True:
            with contextlib.suppress(BlockingIOError):
                if not socket.socket.recv(self.sock, _DISCARDED_BYTES):
                    raise _RefusedError
            # even if there is more, so that a peer that never stops sending does not hold up the others
            yield selectors.EVENT_READ

    def _read(self, size: int) -> Generator[int, None, bytes]:
        data = b""
        while len(data) < size:
            part: bytes = yield from self._try(self.sock.recv, size - len(data))
            if not part:
                raise _RefusedError("it closed the connection before the handshake was complete")
            data += part
        return data

    def _try(self, function: Callable[..., Any], *args: Any) -> Generator[int, None, Any]:
        while True:
            try:
                return function(*args)
            except ssl.SSLWantReadError:
                yield selectors.EVENT_READ
            except ssl.SSLWantWriteError:
                yield selectors.EVENT_WRITE
