"""A connection whose frames are sent by a thread of its own, so that a stage computes while its values travel."""

import threading
from queue import SimpleQueue

from lp_pipe.connections import Connection, Frame
from lp_pipe.connections.base import OnClose, OnFrame
from lp_pipe.errors import Unavailable

_CLOSE_PATIENCE_S = 2.0


class Posting(Connection):
    """Around a connection. The sender's credits bound what waits here; the buffers must not change until then."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.peer)
        self._connection = connection
        self._queue: SimpleQueue[Frame | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name=f"send {connection.peer}", daemon=True)

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self._attach(on_close)
        self._connection.start(on_frame, self._on_end)
        self._thread.start()

    def send(self, frame: Frame) -> None:
        if self._closed_reason is not None:
            raise Unavailable(f"connection to {self.peer} is closed: {self._closed_reason}")
        self._queue.put(frame)

    def close(self, reason: str = "closed") -> None:
        """What was sent before still goes, unless the peer takes too long to read it."""
        self._mark_closed(reason)
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_PATIENCE_S)
        self._connection.close(reason)

    def _on_end(self, reason: str) -> None:
        self._mark_closed(reason)
        self._queue.put(None)

    def _send_all(self) -> None:
        while (frame := self._queue.get()) is not None:
            try:
                self._connection.send(frame)
            except Unavailable as error:  # who has closed it says why, and does so first if it can
                self._connection.close(str(error))
                return
            except BaseException as error:  # too many buffers, no memory: the receiver cannot know what is missing
                self._connection.close(f"the sender failed to send: {type(error).__name__}: {error}")
                return
            del frame  # its memory is used again
