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
from lp_pipe.connections.base import Connection, Listener, OnClose, OnConnection, OnFrame, PulledConnection
from lp_pipe.connections.frames import Frame, FrameError, Ticket
from lp_pipe.connections.loans import Borrower, Lender
from lp_pipe.connections.refusals import Refusals
from lp_pipe.connections.socket_reader import SocketReader
from lp_pipe.errors import Unavailable

SCHEME = "unix:"

_MAX_PIECES = 512  # below every system's IOV_MAX
_JOINED_BYTES = 1 << 12  # up to here one copy costs less than keeping track of the pieces
_CLOSE_PATIENCE_S = 0.2
_ACCEPT_PAUSE_S = 0.1
_RDHUP = getattr(select, "POLLRDHUP", 0)  # elsewhere than on Linux an end of both directions shows even so
_ENDED = "the peer's process closed the connection without a word (it ended or was killed)"
_ENDED_INSIDE = "the peer ended inside a frame"
_UCRED = struct.Struct("3i")


class UnixConnection(PulledConnection):
    """A connected stream socket.

    idle_timeout_s: the peer counts as dead when nothing arrived for so long (it must send pings then).
    """

    def __init__(self, sock: socket.socket, peer: str, idle_timeout_s: float | None = None) -> None:
        super().__init__(peer)
        self._socket = sock
        self._lender = Lender() if loans.is_supported else None
        self._reader = SocketReader(sock, Borrower(self._give_back))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._interruption = -1
        self._on_frame: OnFrame | None = None
        self._send_lock = threading.Lock()
        self._lend_lock = threading.Lock()
        self._idle_timeout_s = idle_timeout_s
        self._farewell: str | None = None
        self._is_over = False
        if idle_timeout_s is not None:
            # A kernel timeout on the read, and not a watchdog thread: a process that was itself frozen or starved
            # for long finds the peer's pings waiting in the socket, and does not take the peer for dead.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(idle_timeout_s))

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self.attach(on_frame, on_close)
        if self.try_reading():  # else it is closed already
            threading.Thread(target=self._read_to_end, name=f"read {self.peer}", daemon=True).start()

    def attach(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self._on_frame = on_frame
        self._attach(on_close)

    def fileno(self) -> int:
        return self._socket.fileno()

    def wait(self, timeout_s: float | None) -> bool:
        events = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        if self._interruption < 0:
            return bool(events)
        descriptors = [descriptor for descriptor, _ in events]
        if self._interruption in descriptors:
            os.eventfd_read(self._interruption)
        return self._socket.fileno() in descriptors

    def is_ready(self) -> bool:
        return bool(self._poll.poll(0))

    def has_peer_closed(self) -> bool:
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()  # one object is for one thread at a time
        poll.register(descriptor, _RDHUP)
        return bool(poll.poll(0))

    def make_interruptible(self) -> None:
        self._interruption = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._interruption, select.POLLIN)

    def interrupt(self) -> None:
        with self._send_lock:  # held when the descriptor is closed
            if self._interruption >= 0:
                os.eventfd_write(self._interruption, 1)

    def read_next(self) -> None:
        self._read_once()

    def read(self) -> None:
        while self._read_once(socket.MSG_DONTWAIT) and not self._reader.is_drained:
            pass

    def done_reading(self) -> None:
        self._reading.release()
        if self._is_over:
            self._dispose()

    def send(self, frame: Frame) -> None:
        pieces = frames.encode(frame)  # before anything is lent for a frame that cannot be sent
        segments: list[Any] = []
        if frame.buffers and self._lender is not None and self._lender.is_welcome:
            with self._lend_lock:
                frame = frame._replace(buffers=self._lender.lend(frame.buffers))
            pieces = frames.encode(frame)
            segments = [buffer.segment for buffer in frame.buffers if type(buffer) is Ticket and buffer.segment]
        with self._send_lock:
            if self._closed_reason is not None:
                raise Unavailable(f"connection to {self.peer} is closed: {self._closed_reason}")
            try:
                _send_all(self._socket, pieces, [segment.descriptor for segment in segments])
            except OSError as error:
                # Mid-frame the stream is of no more use; the reader sees the end and reports it once.
                self._shutdown()
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
        self._end(reason)
        self._dispose()

    def _read_to_end(self) -> None:
        while self._read_once():
            pass
        self.done_reading()

    def _read_once(self, flags: int = 0) -> bool:
        """Deliver the frames that one read completes; False when the connection is at its end."""
        assert self._on_frame is not None
        try:
            if not self._reader.receive(flags):
                return self._end(_ENDED_INSIDE if self._reader.is_inside_frame else _ENDED)
            while (frame := self._reader.next_frame()) is not None:
                if frame.kind == frames.CLOSE:
                    return self._end(frame.name)
                if frame.kind == frames.LOAN_RETURN:
                    self._take_back(frame)
                else:
                    self._on_frame(frame)
        except (BlockingIOError, TimeoutError):
            if flags & socket.MSG_DONTWAIT:
                return True  # all there was is read
            return self._end(f"nothing heard for {self._idle_timeout_s} s")
        except OSError as error:
            return self._end(f"connection lost: {error}")
        except FrameError as error:
            return self._end(str(error))
        except MemoryError:
            return self._end("a frame arrived that does not fit into memory")
        except BaseException as error:  # also Ctrl+C in a thread that reads: what it has read is lost
            self._end(f"a frame could not be handled: {type(error).__name__}: {error}")
            raise
        return True

    def _give_back(self, body: bytes) -> None:
        with contextlib.suppress(Unavailable):
            self.send(Frame(frames.LOAN_RETURN, body=body))

    def _take_back(self, frame: Frame) -> None:
        if self._lender is not None:
            self._lender.take_back(frame.body)

    def _end(self, reason: str) -> bool:
        self._shutdown()
        if self._mark_closed(self._farewell or reason):
            self._is_over = True  # not before `on_close` has returned: until then the descriptor is ours
        return False

    def _shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # frees a reader, and a sender that waits for a frozen peer

    def _dispose(self) -> None:
        """Give the descriptor back, once nobody can be using it: the last one to read does it, or who closes."""
        if self._reading.acquire(blocking=False):  # and kept: nobody reads from now on
            with self._send_lock:
                self._socket.close()
                if self._interruption >= 0:
                    os.close(self._interruption)
                    self._interruption = -1
            self._reader.close()
            if self._lender is not None:
                self._lender.close()


class UnixListener(Listener):
    def __init__(self, endpoint: str, on_connection: OnConnection) -> None:
        self.endpoint = endpoint
        self._path = endpoint.removeprefix(SCHEME)
        self._on_connection = on_connection
        self.refusals = Refusals(endpoint)
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
                self.refusals.note("a process", "it is of another user")
                sock.close()


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


def _send_all(
    sock: socket.socket, pieces: list[bytes | bytearray | memoryview], descriptors: Sequence[int] = ()
) -> None:
    """The descriptors go with the first byte."""
    if not descriptors and sum(map(len, pieces)) <= _JOINED_BYTES:
        sock.sendall(b"".join(pieces))
        return
    pieces = [piece for piece in pieces if len(piece)]
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    while pieces:
        sent = sock.sendmsg(pieces[:_MAX_PIECES], control)
        control = []
        done = 0
        while done < len(pieces) and sent >= len(pieces[done]):
            sent -= len(pieces[done])
            done += 1
        pieces = pieces[done:]
        if sent:
            pieces[0] = memoryview(pieces[0])[sent:]
