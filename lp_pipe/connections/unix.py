"""Two processes of one host: frames over a unix socket in a private directory."""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any

from lp_pipe.connections import frames, loans
from lp_pipe.connections.base import Connection, Listener, OnConnection, OnFrame
from lp_pipe.connections.frames import Frame, Piece, Ticket
from lp_pipe.connections.loans import Borrower, Lender
from lp_pipe.connections.not_inherited import not_inherited
from lp_pipe.connections.refusals import Refusals
from lp_pipe.connections.shortage import not_taken_in
from lp_pipe.connections.silence import TICKS
from lp_pipe.connections.socket_connection import SocketConnection
from lp_pipe.connections.socket_reader import SocketReader
from lp_pipe.connections.thread_locks import release_if_held_here
from lp_pipe.errors import Unavailable
from lp_pipe.private_python import is_held_here

SCHEME = "unix:"

_MAX_PIECES = 512  # below every system's IOV_MAX
_JOINED_BYTES = 1 << 12  # up to here one copy costs less than keeping track of the pieces
_ROOM_BYTES = 1 << 14  # a socket is writable while three quarters of its buffer (208 KiB) are free
_RETURN_BYTES = 64  # of a segment, at most
_ACCEPT_PAUSE_S = 0.1
_UCRED = struct.Struct("3i")


class UnixConnection(SocketConnection):
    """A connected unix socket; large buffers are lent through it."""

    def __init__(self, sock: socket.socket, peer: str, idle_timeout_s: float | None = None) -> None:
        super().__init__(sock, SocketReader(sock, Borrower(self._give_back)), peer, idle_timeout_s)
        self._lender = Lender() if loans.is_supported() else None
        self._lend_lock = threading.RLock()
        if idle_timeout_s is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(idle_timeout_s / TICKS))

    def send(self, frame: Frame) -> None:
        pieces = frames.encode(frame)  # before anything is lent for a frame that cannot be sent
        if not frame.buffers:
            self._send(pieces)
            return
        segments: list[Any] = []
        if self._lender is not None and self._lender.is_welcome and self._may_lend():
            with self._lend_lock:
                frame = frame._replace(buffers=self._lender.lend(frame.buffers))
            pieces = frames.encode(frame)
            segments = [buffer.segment for buffer in frame.buffers if type(buffer) is Ticket and buffer.segment]
        self._send(pieces, [segment.descriptor for segment in segments])

    def _may_lend(self) -> bool:
        """Whether the calling code has not interrupted another that sends or lends."""
        return not is_held_here(self._send_lock) and not is_held_here(self._lend_lock)

    def recover(self) -> None:
        super().recover()
        release_if_held_here(self._lend_lock)
        if self._lender is not None:
            self._lender.recover()

    def has_room_for(self, size: int) -> bool:
        if size > _ROOM_BYTES or (descriptor := self._socket.fileno()) < 0:
            return False
        if not size:
            return True  # a word in passing, of which few are ever unread
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    can_resume_sending = True

    def _send_pieces(self, pieces: list[Piece], descriptors: Sequence[int] = (), *, may_wait: bool = True) -> None:
        _send_all(self._socket, pieces, descriptors, self._sent)

    def _limit_sending(self, seconds: float) -> None:
        # Not settimeout: that is for both directions, and the reader would take it for the peer's silence.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))

    def _deliver(self, frame: Frame, on_frame: OnFrame) -> None:
        if frame.kind != frames.LOAN_RETURN:
            on_frame(frame)
        elif self._lender is not None:
            self._lender.take_back(frame.body)

    def _give_back(self, body: bytes) -> bool:
        if self.closed_reason is None:
            if not self._send_lock.acquire(blocking=False):
                return False
            try:
                if not self.has_room_for(_RETURN_BYTES):
                    return False
            finally:
                self._send_lock.release()
        with contextlib.suppress(Unavailable):
            self.send(Frame(frames.LOAN_RETURN, body=body))
        return True

    def _free(self) -> None:
        super()._free()
        if self._lender is not None:
            self._lender.close()


class UnixListener(Listener):
    def __init__(self, endpoint: str, on_connection: OnConnection) -> None:
        self.endpoint = endpoint
        self._path = endpoint.removeprefix(SCHEME)
        self._on_connection = on_connection
        self.refusals = Refusals(endpoint)
        self._is_closed = False
        self._socket = _without_timeout(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        not_inherited(self._socket)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # left by a killed server of this very address, which is now restarted
        try:
            self._socket.bind(self._path)
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot listen at {endpoint}: {error.strerror or error}") from error
        self._socket.listen(1024)
        try:
            threading.Thread(target=self._accept_loop, name=f"accept {endpoint}", daemon=True).start()
        except RuntimeError:  # out of threads
            self.close()
            raise

    def close(self, reason: str = "closed") -> None:
        self._is_closed = True
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which close() alone does not
        self._turn_away(reason)
        self._socket.close()

    def _turn_away(self, reason: str) -> None:
        """Those who have connected, but were not accepted in time: the system would only reset their connections."""
        with contextlib.suppress(OSError):  # there is nobody left, or it is closed already
            self._socket.setblocking(False)
            while True:
                sock, _ = self._socket.accept()
                UnixConnection(sock, f"client of {self.endpoint}").close(reason)

    def _accept_loop(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                self.refusals.keep_waiting(error)
                time.sleep(_ACCEPT_PAUSE_S)  # out of file descriptors: later there may be some again
                continue
            self.refusals.go_on()
            _without_timeout(sock)
            if _is_same_user(sock):
                self._take_in(UnixConnection(sock, f"client of {self.endpoint}"))
            else:
                self.refusals.note("a process", "it is of another user")
                sock.close()

    def _take_in(self, connection: UnixConnection) -> None:
        try:
            self._on_connection(connection)
        except Exception as error:  # out of descriptors or threads: who comes later may find some
            why = not_taken_in(error)
            self.refusals.note("a process", why)
            connection.close(why)


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a listener of a process on this host, if it runs as the same user.

    Raises:
        Unavailable: nobody listens there, or it is another user's.
    """
    sock = _without_timeout(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.connect(endpoint.removeprefix(SCHEME))
    except OSError as error:
        sock.close()
        raise Unavailable(f"nobody listens at {endpoint}: {error.strerror or error}") from error
    if not _is_same_user(sock):
        sock.close()
        raise Unavailable(f"{endpoint} belongs to another user")
    return UnixConnection(sock, endpoint, idle_timeout_s)


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    return UnixListener(endpoint, on_connection)


def _without_timeout(sock: socket.socket) -> socket.socket:
    """Undo what `socket.setdefaulttimeout` of the user's code does to every new socket."""
    sock.settimeout(None)
    return sock


def _is_same_user(sock: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # macOS: the private directory is the guard
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.getuid())


def _timeval(seconds: float) -> bytes:
    whole, part = divmod(seconds, 1.0)
    return struct.pack("ll", int(whole), int(part * 1e6))


def _send_all(sock: socket.socket, pieces: list[Piece], descriptors: Sequence[int], sent: list[int]) -> None:
    """sent: gets the bytes of each write, in one step with the write, whatever interrupts this thread."""
    if not descriptors and sum(map(len, pieces)) <= _JOINED_BYTES:
        data = b"".join(pieces)
        sent.extend(map(sock.send, (data,)))
        if sent[-1] == len(data):
            return
        pieces = [data[sent[-1] :]]
    pieces = [piece for piece in pieces if len(piece)]
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    while pieces:
        sent.extend(map(sock.sendmsg, (pieces[:_MAX_PIECES],), (control,)))
        control = []
        count, done = sent[-1], 0
        while done < len(pieces) and count >= len(pieces[done]):
            count -= len(pieces[done])
            done += 1
        pieces = pieces[done:]
        if count:
            pieces[0] = memoryview(pieces[0])[count:]
