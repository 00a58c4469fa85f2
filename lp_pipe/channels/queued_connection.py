"""A connection whose frames are sent by a thread of its own, so that a stage computes while its values travel."""

import threading
from queue import SimpleQueue

from lp_pipe.connections import Connection, Frame, PulledConnection
from lp_pipe.connections.base import OnClose, OnFrame
from lp_pipe.errors import Unavailable

_CLOSE_PATIENCE_S = 2.0
_AT_ONCE_BYTES = 1 << 19  # to encrypt so much takes as long as to wake the thread a few times


class QueuedConnection(Connection):
    """Around a connection. The sender's credits bound what waits here; the buffers must not change until then.

    What the system has room for goes at once, where the connection can tell: only the rest is the thread's.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.peer)
        self.inner = connection
        self._queue: SimpleQueue[Frame | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0  # in the queue, and being sent
        self._thread: threading.Thread | None = None

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self._attach(on_close)
        self.inner.start(on_frame, self._on_end)

    def attach(self, on_frame: OnFrame, on_close: OnClose) -> None:
        """In place of `start`, of a PulledConnection."""
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
                    frame = _REST
            self._waiting += 1
            self._queue.put(frame)
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name=f"send {self.peer}", daemon=True)
                self._thread.start()

    def close(self, reason: str = "closed") -> None:
        """What was sent before still goes, unless the peer takes too long to read it."""
        self._mark_closed(reason)
        self._queue.put(None)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._wait_while_it_goes_on(self._thread)
        self.inner.close(reason)

    def _wait_while_it_goes_on(self, thread: threading.Thread) -> None:
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
                if frame is _REST:
                    self.inner.finish_sending()
                else:
                    self.inner.send(frame)
            except Unavailable as error:  # who has closed it says why, and does so first if it can
                if not isinstance(self.inner, PulledConnection) or self.inner.read_alone(0):
                    self.inner.close(str(error))
                return  # else another thread reads, and comes to the end
            except BaseException as error:  # too many buffers, no memory: the receiver cannot know what is missing
                self.inner.close(f"the sender failed to send: {type(error).__name__}: {error}")
                return
            del frame  # its memory is used again
            with self._lock:
                self._waiting -= 1


_REST = Frame(0)


def _size_of(frame: Frame) -> int:
    return len(frame.body) + sum(memoryview(buffer).nbytes for buffer in frame.buffers)
