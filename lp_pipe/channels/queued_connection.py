"""A connection with a thread of its own that sends its frames, so that a stage computes while its values travel."""

import threading
from queue import SimpleQueue

from lp_pipe.connections import Connection, Frame, PulledConnection
from lp_pipe.connections.base import OnClose, OnFrame
from lp_pipe.errors import Unavailable

_CLOSE_PATIENCE_S = 2.0
_AT_ONCE_BYTES = 1 << 19  # encrypting so much takes as long as waking the thread a few times


class QueuedConnection(Connection):
    """Wraps a connection, and queues frames that the system has no room for.

    The sender's credits bound the queue. The buffers of a frame must not change until it is sent. Frames for which the
    system has room are sent at once, if the connection can tell.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.peer)
        self.inner = connection
        self._queue: SimpleQueue[Frame | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0  # frames in the queue and being sent
        self._thread: threading.Thread | None = None

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self._attach(on_close)
        self.inner.start(on_frame, self._on_end)

    def attach(self, on_frame: OnFrame, on_close: OnClose) -> None:
        """Start to use a PulledConnection, in place of `start`."""
        assert isinstance(self.inner, PulledConnection)
        self._attach(on_close)
        self.inner.attach(on_frame, self._on_end)

    def send(self, frame: Frame) -> None:
        if self._closed_reason is not None:
            raise Unavailable(f"connection to {self.peer} is closed: {self._closed_reason}")
        with self._lock:
            if not self._waiting:
                size = _size_of(frame)
                if self.inner.has_room_for(size):
                    self.inner.send(frame)
                    return
                if self.inner.can_begin_sending and size <= _AT_ONCE_BYTES:
                    if self.inner.begin_sending(frame):
                        return
                    frame = _UNFINISHED
            self._waiting += 1
            self._queue.put(frame)
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name=f"send {self.peer}", daemon=True)
                self._thread.start()

    def close(self, reason: str = "closed") -> None:
        """Close after the frames in the queue have been sent, unless the peer takes too long to read them."""
        self._mark_closed(reason)
        self._queue.put(None)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._wait_while_it_progresses(self._thread)
        self.inner.close(reason)

    def _wait_while_it_progresses(self, thread: threading.Thread) -> None:
        seen: tuple[int, int] | None = None
        while thread.is_alive() and (now := (self._waiting, self.inner.sent_bytes)) != seen:
            seen = now
            thread.join(_CLOSE_PATIENCE_S)

    def _on_end(self, reason: str) -> None:
        self._mark_closed(reason)
        self._queue.put(None)

    def _send_all(self) -> None:
        while (frame := self._queue.get()) is not None:
            try:
                if frame is _UNFINISHED:
                    self.inner.finish_sending()
                else:
                    self.inner.send(frame)
            except Unavailable as error:  # the end that closed it has the reason, and reports it first if it can
                if not isinstance(self.inner, PulledConnection) or self.inner.read_alone(0):
                    self.inner.close(str(error))
                return  # otherwise another thread reads, and will reach the end
            except BaseException as error:  # too many buffers, no memory: the receiver lacks a frame
                self.inner.close(f"the sender failed to send: {type(error).__name__}: {error}")
                return
            del frame  # frees its memory for reuse
            with self._lock:
                self._waiting -= 1


_UNFINISHED = Frame(0)  # in the queue, in place of a frame that begin_sending has begun to send


def _size_of(frame: Frame) -> int:
    return len(frame.body) + sum(memoryview(buffer).nbytes for buffer in frame.buffers)
