"""Lets in who has a certificate of the run and shows its token: one thread, however long strangers take."""

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
from lp_pipe.connections.kernel_calls import most_descriptors, new_selector
from lp_pipe.connections.not_inherited import not_inherited
from lp_pipe.connections.refusals import Refusals
from lp_pipe.connections.shortage import not_taken_in
from lp_pipe.connections.tls_stream import server_context

# What a client says first: magic, length of the token, token; the answer: magic, length of the refusal (0: come in),
# refusal.
GREETING = struct.Struct("<4s H")
MAGIC = b"LPT1"

_MAX_TOKEN_BYTES = 1024
_PATIENCE_S = 10.0
_MOST_VISITORS = 1024  # at a time; for more, the first of them must go
_DESCRIPTORS_SHARE = 4  # nor may they have more than this part of what the process may open
_ACCEPT_PAUSE_S = 0.1
_DISCARDED_BYTES = 1 << 16

_Steps = Generator[int, None, None]


class Doorman:
    """Accepts at `listening` until it is closed.

    on_guest: gets the socket and the address of each who may come in, and must not block.
    """

    def __init__(
        self,
        listening: socket.socket,
        credentials: Credentials,
        refusals: Refusals,
        on_guest: Callable[[ssl.SSLSocket, str], object],
    ) -> None:
        self._listening = listening
        not_inherited(listening)
        self._credentials = credentials
        self._context = server_context(credentials)
        self._refusals = refusals
        self._on_guest = on_guest
        self._visitors: dict[ssl.SSLSocket, _Visitor] = {}  # those who came first come first
        self._selector = new_selector()
        self._closing, self._close = os.pipe()
        self._closing_lock = threading.Lock()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"accept {listening.getsockname()[:2]}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Whoever is not in yet is sent away."""
        with self._closing_lock:
            if self._close >= 0:
                os.write(self._close, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._selector, self._listening:
            while True:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj == self._closing:
                        self._end()
                        return
                    if key.fileobj is self._listening:
                        self._accept()
                    else:
                        self._go_on(key.data)
                self._lose_patience()

    def _end(self) -> None:
        for visitor in list(self._visitors.values()):
            self._send_away(visitor)
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
                time.sleep(_ACCEPT_PAUSE_S)  # out of file descriptors: later there may be some again
            return
        self._refusals.go_on()
        where = f"{address[0]}:{address[1]}"
        try:
            guest = self._wrapped(sock)
        except OSError as error:  # it has left again: a reset connection cannot be wrapped
            sock.close()
            self._refusals.note(where, str(error))
            return
        if len(self._visitors) >= min(_MOST_VISITORS, most_descriptors() // _DESCRIPTORS_SHARE):
            self._send_away(next(iter(self._visitors.values())), "too many others wanted to come in")
        visitor = _Visitor(guest, where, self._credentials)
        self._visitors[guest] = visitor
        self._selector.register(guest, selectors.EVENT_READ, visitor)
        self._go_on(visitor)

    def _wrapped(self, sock: socket.socket) -> ssl.SSLSocket:
        sock.getpeername()  # of one that was reset it fails; the ssl module would not close that
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _go_on(self, visitor: "_Visitor") -> None:
        if visitor.sock not in self._visitors:
            return  # sent away in this very round
        try:
            event = next(visitor.steps)
        except StopIteration:
            self._forget(visitor)
            self._let_in(visitor)
        except (OSError, _Refusal) as error:
            if visitor.is_refused:
                self._send_away(visitor)
                return
            self._refusals.note(visitor.address, str(error))
            visitor.refuse()
            self._go_on(visitor)
        else:
            self._selector.modify(visitor.sock, event, visitor)

    def _let_in(self, visitor: "_Visitor") -> None:
        try:
            self._on_guest(visitor.sock, visitor.address)
        except Exception as error:  # out of descriptors or threads: who comes later may find some
            self._refusals.note(visitor.address, not_taken_in(error))

    def _patience_s(self) -> float | None:
        for visitor in self._visitors.values():
            return max(0.0, visitor.deadline - time.monotonic())
        return None

    def _lose_patience(self) -> None:
        for visitor in list(self._visitors.values()):
            if visitor.deadline > time.monotonic():
                return
            self._send_away(visitor, f"it has not shown who it is for {_PATIENCE_S:g} s")

    def _send_away(self, visitor: "_Visitor", why: str = "") -> None:
        if why and not visitor.is_refused:
            self._refusals.note(visitor.address, why)
        self._forget(visitor)
        visitor.sock.close()

    def _forget(self, visitor: "_Visitor") -> None:
        del self._visitors[visitor.sock]
        self._selector.unregister(visitor.sock)


class _Refusal(Exception):
    """Why somebody may not come in."""


class _Visitor:
    """Somebody who is not in yet, or has been refused. steps: each yields the event that it waits for."""

    def __init__(self, sock: ssl.SSLSocket, address: str, credentials: Credentials) -> None:
        self.sock = sock
        self.address = address
        self.deadline = time.monotonic() + _PATIENCE_S
        self.is_refused = False
        self.steps = self._show_who_it_is()
        self._credentials = credentials

    def refuse(self) -> None:
        """It may still read why: what comes from it meanwhile is thrown away, or closing would take back the answer."""
        self.is_refused = True
        self.steps = self._leave()

    def _show_who_it_is(self) -> _Steps:
        yield from self._try(self.sock.do_handshake)
        magic, length = GREETING.unpack((yield from self._read(GREETING.size)))
        if magic != MAGIC or length > _MAX_TOKEN_BYTES:
            raise _Refusal("it does not speak as lp_pipe of this version does")
        token = yield from self._read(length)
        refusal = "" if self._credentials.is_token(token) else f"showed {'a wrong' if token else 'no'} token"
        answer = f"the peer {refusal}".encode() if refusal else b""
        yield from self._try(self.sock.send, GREETING.pack(MAGIC, len(answer)) + answer)
        if refusal:
            raise _Refusal(f"it {refusal}")

    def _leave(self) -> _Steps:
        socket.socket.shutdown(self.sock, socket.SHUT_WR)
        while True:
            with contextlib.suppress(BlockingIOError):
                if not socket.socket.recv(self.sock, _DISCARDED_BYTES):
                    raise _Refusal
            yield selectors.EVENT_READ  # also if there is more: who never stops sending must not stop the others

    def _read(self, size: int) -> Generator[int, None, bytes]:
        data = b""
        while len(data) < size:
            part: bytes = yield from self._try(self.sock.recv, size - len(data))
            if not part:
                raise _Refusal("it left without a word")
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
