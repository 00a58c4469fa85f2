"""The server's side of one call: what it sends back to the caller."""

import contextlib
from collections.abc import Callable
from typing import Any

from lp_pipe.connections import Connection, Frame, frames
from lp_pipe.errors import Unavailable
from lp_pipe.rpc import codec, remote_error
from lp_pipe.rpc.pickle_errors import pickle_error

SendLater = Callable[[Connection, Callable[[Frame], None], Frame], bool]


class Responder:
    """Sends a result, an error or a stream, then calls `on_end`. A caller that has gone is not an error.

    server: the node, for messages ("server/0").
    send: sends a frame on the connection.
    before_result: called before a result is sent, because the caller's next call may follow at once.
    send_later: called with the connection, and a function that sends this frame at last. Returns False if that is to be
        called at once.
    """

    __slots__ = ("_on_end", "_send_frame", "_server", "before_result", "connection", "id", "method", "send_later")

    def __init__(
        self,
        connection: Connection,
        call: Frame,
        server: str,
        on_end: Callable[["Responder"], None],
        send: Callable[[Connection, Frame], None],
    ) -> None:
        self.connection = connection
        self.id = call.id
        self.method = call.name
        self._server = server
        self._on_end = on_end
        self._send_frame = send
        self.before_result: Callable[[], None] | None = None
        self.send_later: SendLater | None = None

    def result(self, value: Any) -> None:
        if self.before_result is not None:
            self.before_result()
        self._last(self._encoded(frames.RESULT, value))

    def error(self, error: BaseException) -> None:
        """Send a handler's exception, even SystemExit."""
        self._last(self._error_frame(remote_error.capture(error)))

    def own_error(self, origin: Any, text: str) -> None:
        """Send an error of the call itself; `origin` is a constant of remote_error."""
        self._last(self._error_frame(remote_error.own(origin, text)))

    def cancelled(self) -> None:
        """Send that the handler was cancelled: the caller gave it up, or the server is stopping."""
        self.own_error(remote_error.UNAVAILABLE, f"{self.method}() of {self._server} was cancelled")

    def open_stream(self) -> None:
        """Tell the caller that the result is the stream of what `item` sends."""
        self._send(Frame(frames.STREAM_OPEN, self.id))

    def item(self, value: Any, on_size: Callable[[int], object]) -> bool:
        """Send one item; False when it does not pickle, which ends the stream.

        on_size: called with the item's bytes before it is sent, because the consumer's credit may arrive at once.
        """
        frame = self._encoded(frames.STREAM_ITEM, value)
        if frame.kind == frames.ERROR:
            self._last(frame)
            return False
        on_size(frame.size_bytes)
        is_sent = self._send(frame)
        if not is_sent:
            self._on_end(self)
        return is_sent

    def end_stream(self) -> None:
        """Tell the caller that there are no more items."""
        self._last(Frame(frames.STREAM_END, self.id))

    def _encoded(self, kind: int, value: Any) -> Frame:
        is_same_process = self.connection.is_same_process
        try:
            body, buffers = codec.encode(value, is_same_process=is_same_process)
        except BaseException as error:  # even a __reduce__ that exits: the caller would wait for ever
            call = f"{self.method}() of {self._server}"
            why = pickle_error(call, [("result", value)], error, is_same_process=is_same_process)
            return self._error_frame(remote_error.own(remote_error.SERIALIZATION, str(why)))
        return Frame(kind, self.id, "", body, buffers)

    def _error_frame(self, body: bytes) -> Frame:
        return Frame(frames.ERROR, self.id, body=body)

    def _last(self, frame: Frame) -> None:
        if self.send_later is None or not self.send_later(self.connection, self._finish, frame):
            self._finish(frame)

    def _finish(self, frame: Frame) -> None:
        try:
            self._send(frame)
        finally:
            self._on_end(self)

    def _send(self, frame: Frame) -> bool:
        """Send the frame; False when it was too large and an error was sent in its place."""
        try:
            self._send_frame(self.connection, frame)
        except Unavailable:  # the caller has gone
            return True
        except frames.FrameError as error:  # without an answer the caller would wait for ever
            text = f"the result of {self._server} is too large: {error}"
            with contextlib.suppress(Unavailable):
                self.connection.send(self._error_frame(remote_error.own(remote_error.SERIALIZATION, text)))
            return False
        return True
