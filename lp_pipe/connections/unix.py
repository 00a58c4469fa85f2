"""Two processes of one host: frames over a unix socket in a private directory."""

import contextlib
import os
import socket
import struct
import threading
import time

from lp_pipe.connections import frames
from lp_pipe.connections.base import Connection, Listener, OnClose, OnConnection, OnFrame
from lp_pipe.connections.frames import Frame, FrameError
from lp_pipe.errors import Unavailable

SCHEME = "unix:"

_READ_AHEAD_BYTES = 1 << 16
_MAX_PIECES = 512  # below every system's IOV_MAX
_CLOSE_PATIENCE_S = 0.2
_ACCEPT_PAUSE_S = 0.1
_UCRED = struct.Struct("3i")


class UnixConnection(Connection):
    """A connected stream socket and the thread that reads it.

    idle_timeout_s: the peer counts as dead when nothing arrived for so long (it must send pings then).
    """

    def __init__(self, sock: socket.socket, peer: str, idle_timeout_s: float | None = None) -> None:
        super().__init__(peer)
        self._socket = sock
        self._send_lock = threading.Lock()
        self._idle_timeout_s = idle_timeout_s
        self._farewell: str | None = None
        if idle_timeout_s is not None:
            # A kernel timeout on the read, and not a watchdog thread: a process that was itself frozen or starved
            # for long finds the peer's pings waiting in the socket, and does not take the peer for dead.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(idle_timeout_s))

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self._attach(on_close)
        threading.Thread(target=self._read_loop, args=(on_frame,), name=f"read {self.peer}", daemon=True).start()

    def send(self, frame: Frame) -> None:
        pieces = frames.encode(frame)
        with self._send_lock:
            if self._closed_reason is not None:
                raise Unavailable(f"connection to {self.peer} is closed: {self._closed_reason}")
            try:
                _send_all(self._socket, pieces)
            except OSError as error:
                # Mid-frame the stream is of no more use; the reader sees the end and reports it once.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise Unavailable(f"connection to {self.peer} broke while sending: {error}") from error

    def close(self, reason: str = "closed") -> None:
        if self._closed_reason is not None:
            return
        self._farewell = reason  # the peer may answer it by closing before this method is through
        # A sender that is stuck because the peer does not read must not keep us from closing.
        if self._send_lock.acquire(timeout=_CLOSE_PATIENCE_S):
            try:
                # Not settimeout: that is for both directions, and the reader would take it for the peer's silence.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_CLOSE_PATIENCE_S))
                _send_all(self._socket, frames.encode(Frame(frames.CLOSE, name=reason[:1000])))
            except OSError:
                pass  # the peer is gone already; it needs no reason
            finally:
                self._send_lock.release()
        self._mark_closed(reason)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read_loop(self, on_frame: OnFrame) -> None:
        reader = _Reader(self._socket)
        reason = "the peer's process closed the connection without a word (it ended or was killed)"
        try:
            while (frame := reader.read_frame()) is not None:
                if frame.kind == frames.CLOSE:
                    self._mark_closed(frame.name)
                    break
                on_frame(frame)
        except (BlockingIOError, TimeoutError):
            if self._closed_reason is None:
                reason = f"nothing heard for {self._idle_timeout_s} s"
        except OSError as error:
            reason = f"connection lost: {error}"
        except FrameError as error:
            reason = str(error)
        except MemoryError:
            reason = "a frame arrived that does not fit into memory"
        except BaseException as error:
            reason = f"a frame could not be handled: {type(error).__name__}: {error}"
            raise
        finally:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # frees a sender that waits for a frozen peer
            self._mark_closed(self._farewell or reason)
            with self._send_lock:
                self._socket.close()


class UnixListener(Listener):
    def __init__(self, endpoint: str, on_connection: OnConnection) -> None:
        self.endpoint = endpoint
        self._path = endpoint.removeprefix(SCHEME)
        self._on_connection = on_connection
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # left by a killed server of this very address, which is now restarted
        try:
            self._socket.bind(self._path)
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot listen at {endpoint}: {error.strerror or error}") from error
        self._socket.listen(1024)
        threading.Thread(target=self._accept_loop, name=f"accept {endpoint}", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which close() alone does not
        self._socket.close()

    def _accept_loop(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_ACCEPT_PAUSE_S)  # out of file descriptors: later there may be some again
                continue
            if _is_same_user(sock):
                self._on_connection(UnixConnection(sock, f"client of {self.endpoint}"))
            else:
                sock.close()


class _Reader:
    """Cuts a byte stream into frames; reads ahead a little, and large pieces straight into their own memory."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._ahead = bytearray(_READ_AHEAD_BYTES)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0

    def read_frame(self) -> Frame | None:
        """The next frame, or None at a clean end of the stream."""
        if not self._fill(frames.PREFIX_BYTES):
            return None
        length = frames.header_length(self._take(frames.PREFIX_BYTES))
        header = frames.decode_header(self._read(length))
        body = self._read(header.body_bytes)
        buffers = [self._read(size) for size in header.buffer_bytes]
        return Frame(header.kind, header.id, header.name, body, buffers)

    def _fill(self, needed: int) -> bool:
        """Read ahead until `needed` bytes are there; False when the stream ends before."""
        if self._end - self._start < needed and self._start:
            rest = self._end - self._start
            self._view[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest
        while self._end - self._start < needed:
            count = self._socket.recv_into(self._view[self._end :])
            if count == 0:
                return False
            self._end += count
        return True

    def _take(self, size: int) -> memoryview:
        self._start += size
        return self._view[self._start - size : self._start]

    def _read(self, size: int) -> bytearray:
        """Exactly `size` bytes, in memory of their own (what is built on them stays writable)."""
        if size <= self._end - self._start:
            return bytearray(self._take(size))
        data = bytearray(size)
        ready = self._end - self._start
        data[:ready] = self._take(ready)
        view = memoryview(data)
        while ready < size:
            count = self._socket.recv_into(view[ready:])
            if count == 0:
                raise ConnectionError(f"the peer ended inside a frame ({ready} of {size} bytes)")
            ready += count
        return data


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a listener of a process on this host, if it runs as the same user.

    Raises:
        Unavailable: nobody listens there, or it is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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


def _is_same_user(sock: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # macOS: the private directory is the guard
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.getuid())


def _timeval(seconds: float) -> bytes:
    whole, part = divmod(seconds, 1.0)
    return struct.pack("ll", int(whole), int(part * 1e6))


def _send_all(sock: socket.socket, pieces: list[bytes | bytearray | memoryview]) -> None:
    pieces = [piece for piece in pieces if len(piece)]
    while pieces:
        sent = sock.sendmsg(pieces[:_MAX_PIECES])
        done = 0
        while done < len(pieces) and sent >= len(pieces[done]):
            sent -= len(pieces[done])
            done += 1
        pieces = pieces[done:]
        if sent:
            pieces[0] = memoryview(pieces[0])[sent:]
