"""Connections between two processes of one host, over a unix socket in a private directory."""

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

from lp_pipe.connections import frames, shm_buffers
from lp_pipe.connections.base import Connection, Listener, OnConnection, OnFrame
from lp_pipe.connections.fork_isolation import close_in_children
from lp_pipe.connections.frames import BufferReference, Frame, Piece
from lp_pipe.connections.io_thread import TICKS
from lp_pipe.connections.refusals import Refusals
from lp_pipe.connections.resource_limits import describe_rejection
from lp_pipe.connections.shm_buffers import BufferExporter, BufferImporter
from lp_pipe.connections.socket_connection import SocketConnection
from lp_pipe.connections.socket_reader import SocketReader
from lp_pipe.errors import Unavailable
from lp_pipe.private_python import is_held_here, release_if_held_here

SCHEME = "unix:"

_MAX_PIECES = 512  # below every system's IOV_MAX
_JOINED_BYTES = 1 << 12  # up to this size one copy costs less than keeping track of the pieces
_ROOM_BYTES = 1 << 16  # a socket is writable while three quarters of its buffer (208 KiB) are free
_RETURN_BYTES = 64  # the largest size of a segment's return
_ACCEPT_PAUSE_S = 0.1
_UCRED = struct.Struct("3i")


class UnixConnection(SocketConnection):
    """A connected unix socket; large buffers go through shared memory."""

    def __init__(self, sock: socket.socket, peer: str, idle_timeout_s: float | None = None) -> None:
        super().__init__(sock, SocketReader(sock, BufferImporter(self._send_return)), peer, idle_timeout_s)
        self._exporter = BufferExporter() if shm_buffers.is_supported() else None
        self._export_lock = threading.RLock()
        if idle_timeout_s is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(idle_timeout_s / TICKS))

    def send(self, frame: Frame) -> None:
        pieces = frames.encode(frame)  # checked before anything is exported for a frame that cannot be sent
        if not frame.buffers:
            self._send(pieces)
            return
        segments: list[Any] = []
        if self._exporter is not None and self._exporter.is_peer_ready and self._may_export():
            with self._export_lock:
                frame = frame._replace(buffers=self._exporter.export(frame.buffers))
            pieces = frames.encode(frame)
            segments = [
                buffer.segment for buffer in frame.buffers if type(buffer) is BufferReference and buffer.segment
            ]
        self._send(pieces, [segment.descriptor for segment in segments])

    def _may_export(self) -> bool:
        """Return whether the calling code has not interrupted code that sends or exports."""
        return not self.is_sending_here() and not is_held_here(self._export_lock)

    def recover(self) -> None:
        super().recover()
        release_if_held_here(self._export_lock)
        if self._exporter is not None:
            self._exporter.recover()

    def has_room_for(self, size: int) -> bool:
        if size > _ROOM_BYTES or (descriptor := self._socket.fileno()) < 0:
            return False
        if not size:
            return True  # an empty frame, of which few are ever unread
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    can_read_once = True

    def read_once(self) -> None:
        self._is_inside_read = True
        try:
            self._read_once(socket.MSG_DONTWAIT)
        finally:
            self._is_inside_read = False

    can_resume_sending = True

    def _send_pieces(self, pieces: list[Piece], descriptors: Sequence[int] = (), *, may_wait: bool = True) -> None:
        _send_all(self._socket, pieces, descriptors, self._sent)

    def _limit_sending(self, seconds: float) -> None:
        # Not settimeout, which is for both directions: the reader would take a timeout for the peer's silence.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))

    def _deliver(self, frame: Frame, on_frame: OnFrame) -> None:
        if frame.kind != frames.BUFFER_RETURN:
            on_frame(frame)
        elif self._exporter is not None:
            self._exporter.reclaim(frame.body)

    def _send_return(self, body: bytes) -> bool:
        if self.closed_reason is None:
            if not self._send_lock.acquire(blocking=False):
                return False
            try:
                if not self.has_room_for(_RETURN_BYTES):
                    return False
            finally:
                self._send_lock.release()
        with contextlib.suppress(Unavailable):
            self.send(Frame(frames.BUFFER_RETURN, body=body))
        return True

    def _free(self) -> None:
        super()._free()
        if self._exporter is not None:
            self._exporter.close()


class UnixListener(Listener):
    def __init__(self, endpoint: str, on_connection: OnConnection) -> None:
        self.endpoint = endpoint
        self._path = endpoint.removeprefix(SCHEME)
        self._on_connection = on_connection
        self.refusals = Refusals(endpoint)
        self._is_closed = False
        self._socket = _without_timeout(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        close_in_children(self._socket)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # left by a killed server of this address, which is now restarted
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
        self.refusals.summarize()

    def _turn_away(self, reason: str) -> None:
        """Send the reason to clients that were not accepted in time; the system would only reset their connections."""
        with contextlib.suppress(OSError):  # no client is left, or the socket is closed already
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
                time.sleep(_ACCEPT_PAUSE_S)  # out of file descriptors; some may be free later
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
        except Exception as error:  # out of descriptors or threads; a later client may find some
            why = describe_rejection(error)
            self.refusals.note("a process", why)
            connection.close(why)


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a listener of a process on this host that runs as the same user.

    Raises:
        Unavailable: nothing listens there, or the listener belongs to another user.
    """
    sock = _without_timeout(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.connect(endpoint.removeprefix(SCHEME))
    except OSError as error:
        sock.close()
        raise Unavailable(f"nothing listens at {endpoint}: {error.strerror or error}") from error
    if not _is_same_user(sock):
        sock.close()
        raise Unavailable(f"{endpoint} belongs to another user")
    return UnixConnection(sock, endpoint, idle_timeout_s)


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    return UnixListener(endpoint, on_connection)


def _without_timeout(sock: socket.socket) -> socket.socket:
    """Remove the timeout that `socket.setdefaulttimeout` of the user's code gives every new socket."""
    sock.settimeout(None)
    return sock


def _is_same_user(sock: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # macOS: only the private directory protects the socket
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.getuid())


def _timeval(seconds: float) -> bytes:
    whole, part = divmod(seconds, 1.0)
    return struct.pack("ll", int(whole), int(part * 1e6))


def _send_all(sock: socket.socket, pieces: list[Piece], descriptors: Sequence[int], sent: list[int]) -> None:
    """Send the pieces, the descriptors with the first byte.

    sent: gets the bytes of each write, in one step with the write, whatever interrupts this thread.
    """
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
