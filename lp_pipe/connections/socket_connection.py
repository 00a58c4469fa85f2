"""A connection over a stream socket, which is read by the very thread that waits for a reply."""

import contextlib
import errno
import os
import select
import socket
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from lp_pipe.connections import frames
from lp_pipe.connections.base import OnClose, OnFrame, PulledConnection
from lp_pipe.connections.fork_isolation import close_in_children
from lp_pipe.connections.frames import Frame, FrameError, Piece
from lp_pipe.connections.io_thread import TICKS
from lp_pipe.connections.socket_reader import SocketReader
from lp_pipe.errors import Unavailable
from lp_pipe.private_python import holder_check, release_if_held_here

_CLOSE_PATIENCE_S = 0.2
_JOINED_BYTES = 1 << 12  # postponed frames are joined up to this size
_ENDED = "the peer's process closed the connection without a reason (it ended or was killed)"
_ENDED_INSIDE = "the peer ended inside a frame"
_RDHUP = getattr(select, "POLLRDHUP", 0)  # without it (not on Linux), POLLHUP still shows an end of both directions


class SocketConnection(PulledConnection):
    """The base of connections over a stream socket; a subclass says how bytes get into the socket.

    idle_timeout_s: the peer counts as dead when nothing arrived for this long of time in which this process was awake;
        it must send pings then. A subclass must let `receive` wait for at most one tick of it (silence.py).
    """

    def __init__(self, sock: socket.socket, reader: SocketReader, peer: str, idle_timeout_s: float | None) -> None:
        super().__init__(peer)
        self._socket = sock
        close_in_children(sock)
        self._reader = reader
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._interruption = -1
        # not the lock for sending: `interrupt` must not wait for a slow peer
        self._interruption_lock = threading.RLock()
        self._on_frame: OnFrame | None = None
        self._send_lock = threading.RLock()
        self.is_sending_here = holder_check(self._send_lock)  # type: ignore[method-assign]  # faster
        self._sent: list[int] = []  # bytes of the current frame; changed with the lock held
        # What is sent first when the lock is free again: the rest of an interrupted frame, and frames of the code that
        # interrupted it.
        self._postponed: deque[bytes] = deque()
        self._is_torn = False  # a frame was sent in part, and the rest is lost
        self._is_inside_read = False
        self._idle_timeout_s = idle_timeout_s
        self._silent_ticks = 0
        self._own_reason: str | None = None
        self._is_over = False
        self._silent_end = _ENDED  # the reason when the peer gives none

    @abstractmethod
    def _send_pieces(self, pieces: list[Piece], descriptors: Sequence[int] = (), *, may_wait: bool = True) -> None:
        """Block until all pieces are on their way, the descriptors with the first byte; called with the lock held.

        Updates `_sent`: at any bytecode if `can_resume_sending`, else at the end.

        may_wait: False for `begin_sending`, which does not block.

        Raises:
            OSError: the socket is of no more use.
        """

    can_resume_sending = False

    @abstractmethod
    def _limit_sending(self, seconds: float) -> None:
        """Let `_send_pieces` block for at most this long from now on; reads are not limited."""

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self.attach(on_frame, on_close)
        if self.try_reading():  # otherwise it is closed already
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

    @property
    def is_inside_frame(self) -> bool:
        return self._reader.is_inside_frame

    def prefer_cubic(self) -> None:
        """Send as TCP's cubic says, where the system can: with many busy connections bbr takes longer."""
        if self._socket.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_CONGESTION"):
            with contextlib.suppress(OSError):  # the kernel lacks it
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")

    def limit_unsent(self, size: int) -> None:
        """Take no more bytes while TCP has so many that it has not begun to send, where the system can."""
        if self._socket.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError):  # the kernel lacks it
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)

    @property
    def missing_bytes(self) -> int:
        return self._reader.missing_bytes

    def be_ready_at(self, size: int) -> None:
        with contextlib.suppress(OSError):  # the socket is closed
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def has_peer_closed(self) -> bool:
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()  # a poll object is for one thread at a time
        poll.register(descriptor, _RDHUP)
        return bool(poll.poll(0))

    def make_interruptible(self) -> None:
        self._interruption = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._interruption, select.POLLIN)

    def interrupt(self) -> None:
        with self._interruption_lock:  # the descriptor is closed with the lock held
            if self._interruption >= 0:
                os.eventfd_write(self._interruption, 1)

    def read_next(self) -> None:
        self._read_once()

    def read(self) -> None:
        self._is_inside_read = True
        try:
            while self._read_once(socket.MSG_DONTWAIT) and not self._reader.is_drained:
                pass
        finally:
            self._is_inside_read = False

    def done_reading(self) -> None:
        self._reader_of.pop("reader", None)
        if self._is_over:
            self._dispose()

    def recover(self) -> None:
        super().recover()
        release_if_held_here(self._interruption_lock)
        release_if_held_here(self._send_lock)
        if self.is_read_here():
            self._is_inside_read = False
            self.done_reading()
        # end it now: else the next call would be sent before a reader notices
        if self._is_torn and self._closed_reason is None:
            self._end("an exception interrupted a send in the middle of a frame")
            self._dispose()

    def is_stuck_here(self) -> bool:
        return self._is_inside_read and self.is_read_here()

    def read_inside(self, timeout_s: float | None) -> None:
        poll = select.poll()  # a new one, since `wait` may have been interrupted inside of its own
        poll.register(self._socket.fileno(), select.POLLIN)
        if self._has_decrypted() or poll.poll(None if timeout_s is None else timeout_s * 1000):
            self.read()

    def _has_decrypted(self) -> bool:
        """Return whether there is something to read that the kernel does not know of."""
        return False

    def send(self, frame: Frame) -> None:
        self._send(frames.encode(frame))

    can_send_later = True

    def send_later(self, frame: Frame) -> None:
        self._postponed.append(b"".join(frames.encode(frame)))

    def flush(self) -> None:
        if not self.is_sending_here():
            with self._send_lock:
                if self._closed_reason is not None:
                    raise self._unavailable()
                self._send_postponed()

    def _send(self, pieces: list[Piece], descriptors: Sequence[int] = (), *, may_wait: bool = True) -> None:
        if self.is_sending_here():  # the code below this one on the stack holds it
            self._postponed.append(b"".join(pieces))
            return
        with self._send_lock:
            if self._closed_reason is not None:
                raise self._unavailable()
            if self._postponed:
                self._send_postponed()
            self._send_whole(pieces, descriptors, may_wait=may_wait)
        if self._postponed and may_wait:  # frames that a signal handler has sent meanwhile
            with self._send_lock:
                self._send_postponed()

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"connection to {self.peer} is closed: {self._closed_reason}")

    def _send_postponed(self) -> None:
        while self._postponed:
            whole = self._postponed.popleft()
            while self._postponed and len(whole) < _JOINED_BYTES:
                whole += self._postponed.popleft()
            self._send_whole([whole])

    def _send_whole(self, pieces: list[Piece], descriptors: Sequence[int] = (), *, may_wait: bool = True) -> None:
        """Send a frame. If an exception interrupts it, the rest is sent with the next frame."""
        self._sent.clear()
        try:
            self._send_pieces(pieces, descriptors, may_wait=may_wait)
        except OSError as error:
            # In the middle of a frame the stream is of no more use; the reader sees the end and reports it once.
            self._shutdown()
            why = self._own_reason or str(error)
            raise Unavailable(f"connection to {self.peer} broke while sending: {why}") from error
        except BaseException:  # such as Ctrl+C: the peer would take what comes next for the rest of this frame
            self._keep_rest(pieces, has_descriptors=bool(descriptors))
            raise

    def _keep_rest(self, pieces: list[Piece], *, has_descriptors: bool) -> None:
        sent = sum(self._sent)
        if self.can_resume_sending:
            self._is_torn = has_descriptors and not sent  # the peer would never get the descriptors
        else:
            self._is_torn = not self._sent or sent < sum(map(len, pieces))
        if self._is_torn:
            self._shutdown()
        elif sent and (rest := b"".join(pieces)[sent:]):
            self._postponed.appendleft(rest)

    def close(self, reason: str = "closed") -> None:
        if self._closed_reason is not None:
            return
        self._own_reason = reason  # the peer may answer by closing before this method is done
        self._send_close(reason)
        self._finish_close(reason)

    def _send_close(self, reason: str) -> None:
        """Send the last frame, which says why there will be no more."""
        # A sender that is stuck because the peer does not read must not prevent the close.
        if not self.is_sending_here() and self._send_lock.acquire(timeout=_CLOSE_PATIENCE_S):
            try:
                self._limit_sending(_CLOSE_PATIENCE_S)
                self._send_postponed()
                self._send_pieces(frames.encode(Frame(frames.CLOSE, name=reason[:1000])))
            except (OSError, Unavailable):
                pass  # the peer is gone already and needs no reason
            finally:
                self._send_lock.release()

    def _finish_close(self, reason: str) -> None:
        """Close after the last frame was sent; the peer must still be able to read it."""
        self._end(reason)
        self._dispose()

    def _read_to_end(self) -> None:
        self._reader_of["reader"] = (threading.get_ident(),)  # until now it was the thread that started this one
        while self._read_once():
            pass
        self.done_reading()

    def _read_once(self, flags: int = 0) -> bool:
        """Deliver the frames that one read completes; False at the connection's end."""
        assert self._on_frame is not None
        try:
            if not self._reader.receive(flags):
                return self._end(_ENDED_INSIDE if self._reader.is_inside_frame else self._silent_end)
            self._silent_ticks = 0
            while (frame := self._reader.next_frame()) is not None:
                if frame.kind == frames.CLOSE:
                    return self._end(frame.name)
                self._deliver(frame, self._on_frame)
                if not self._reader.has_more:
                    break
        except (BlockingIOError, TimeoutError) as error:
            if error.errno == errno.ETIMEDOUT:  # the kernel's timeout
                return self._end(f"connection lost: {error}")
            if flags & socket.MSG_DONTWAIT:
                return True  # all that was there is read
            self._silent_ticks += 1
            if self._silent_ticks < TICKS:
                return True
            return self._end(f"nothing arrived for {self._idle_timeout_s} s")
        except OSError as error:
            return self._end(f"connection lost: {error}")
        except FrameError as error:
            return self._give_up(str(error))
        except MemoryError:
            return self._give_up("a frame arrived that does not fit into memory")
        except BaseException as error:  # also Ctrl+C in the reading thread, which loses what it has read
            self._give_up(f"a frame could not be handled: {type(error).__name__}: {error}")
            raise
        return True

    def _give_up(self, reason: str) -> bool:
        """End the connection and send the reason, without which the peer would take this process for dead."""
        if self._closed_reason is None:
            self._send_close(reason)
        return self._end(reason)

    def _deliver(self, frame: Frame, on_frame: OnFrame) -> None:
        on_frame(frame)

    def _end(self, reason: str) -> bool:
        self._shutdown()
        if self._mark_closed(self._own_reason or reason):
            self._is_over = True  # set after `on_close` has returned: until then the descriptor is in use
        return False

    def _shutdown(self) -> None:
        """Wake a thread that reads, and one that sends to a frozen peer."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _dispose(self) -> None:
        """Close the descriptor once no thread can be using it; called by the last reader or the closing thread."""
        if self.try_reading():  # and never released: nothing is read from now on
            self._reader_of["reader"] = (0,)
            with self._send_lock:
                self._socket.close()
            with self._interruption_lock:
                if self._interruption >= 0:
                    os.close(self._interruption)
                    self._interruption = -1
            self._free()

    def _free(self) -> None:
        """Free what is not needed without the socket."""
        self._reader.close()
