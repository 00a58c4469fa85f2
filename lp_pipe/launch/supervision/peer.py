"""Either end of a connection that carries supervision messages: notices, questions and their answers, both ways."""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from lp_pipe.connections import Connection, Frame, frames
from lp_pipe.connections.frames import Piece
from lp_pipe.errors import LaunchError, Unavailable
from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.messages import Notice, Question

M = TypeVar("M")
R = TypeVar("R")

_log = logging.getLogger(__name__)

_ERRORS: dict[str, type[Exception]] = {"Unavailable": Unavailable, "RuntimeError": RuntimeError}
_NO_ANSWER = 0  # the id of a message without an answer


class PendingAnswers:
    """The futures of questions that were asked and not answered, by number.

    Thread-safe without a lock: a signal handler that has interrupted one of these methods may call them, too.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(_NO_ANSWER + 1)
        self._futures: dict[int, Future[Any]] = {}
        self.closed_reason: str | None = None  # None while answers may come

    def add(self) -> "tuple[int, Future[Any]]":
        """Return the number of a new question, and the future of its answer; Unavailable after `close`."""
        number, answer = next(self._numbers), Future[Any]()
        self._futures[number] = answer
        if self.closed_reason is not None:  # looked at last: `close` may not have seen the question
            self.settle(number, Unavailable(self.closed_reason))
        return number, answer

    def settle(self, number: int, outcome: Any) -> None:
        """Give a question its outcome, an exception or a value; ignored for one that has an outcome already."""
        answer = self._futures.pop(number, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def fail(self, number: int, type_name: str, text: str) -> None:
        """Settle a question with the error that the other end has reported by its type and text."""
        self.settle(number, _ERRORS.get(type_name, LaunchError)(text))

    def close(self, reason: str) -> None:
        """Settle all questions, also those that are asked later, with Unavailable."""
        self.closed_reason = reason
        for number in list(self._futures):
            self.settle(number, Unavailable(reason))


class Codec(Protocol):
    """The form of messages as bytes, with buffers that travel beside these."""

    def encode(self, value: Any, /) -> tuple[bytes, Sequence[Any]]: ...

    def decode(self, body: Piece, buffers: Sequence[Any] = (), /) -> Any: ...


class Handlers:
    """A function for each type of message, as `handle` of a Peer."""

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[[Any], object]] = {}

    def on(self, kind: type[M], handle: Callable[[M], object]) -> None:
        """Handle messages of this type with this function."""
        self._handlers[kind] = handle

    def __call__(self, message: Any) -> object:
        try:
            return self._handlers[type(message)](message)
        except Exception:
            if isinstance(message, Question):
                raise  # in the code that asks
            _log.exception("the notice %s could not be handled", type(message).__name__)
            return None


class Peer:
    """The messages of one connection. It is given the frames and the end (`on_frame`, `on_close`).

    handle: called in the connection's thread with each message of the other end, so it must not block. It returns the
        answer of a question, or a Future of it.
    """

    def __init__(self, connection: Connection, handle: Callable[[Any], object], codec: Codec = messages) -> None:
        self.connection = connection
        self.handle = handle
        self._codec = codec
        self._pending = PendingAnswers()

    def start(self) -> None:
        """Let the connection's thread handle what the other end sends, and has sent."""
        self.connection.start(self.on_frame, self.on_close)

    def tell(self, notice: Notice, payload: bytes | None = None) -> None:
        """Send a notice.

        Raises:
            Unavailable: the connection is closed.
        """
        self._send(_NO_ANSWER, notice, payload)

    def tell_if_open(self, notice: Notice, payload: bytes | None = None) -> None:
        """Send a notice that does not matter any more once the connection is closed."""
        with suppress(Unavailable):
            self.tell(notice, payload)

    def ask(self, question: Question[R]) -> "Future[R]":
        """Send a question; its answer is Unavailable when the connection closes before it comes."""
        number, answer = self._pending.add()
        if not answer.done():
            try:
                self._send(number, question)
            except Unavailable as error:
                self._pending.settle(number, error)
        return answer

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.SUPERVISION:
            self._on_message(frame.id, self._codec.decode(frame.body, frame.buffers))
        elif frame.kind == frames.RESULT:
            self._pending.settle(frame.id, self._codec.decode(frame.body, frame.buffers))
        elif frame.kind == frames.ERROR:
            kind, text = self._codec.decode(frame.body, frame.buffers)
            self._pending.fail(frame.id, kind, text)

    def on_close(self, reason: str) -> None:
        self._pending.close(reason)

    def _on_message(self, number: int, message: Any) -> None:
        if number == _NO_ANSWER:
            self.handle(message)
            return
        try:
            answer = self.handle(message)
        except Exception as error:
            self._answer(number, error)
            return
        if isinstance(answer, Future):
            answer.add_done_callback(functools.partial(self._answer_with, number))
        else:
            self._answer(number, answer)

    def _answer_with(self, number: int, done: "Future[Any]") -> None:
        error = done.exception()
        self._answer(number, done.result() if error is None else error)

    def _answer(self, number: int, outcome: Any) -> None:
        is_error = isinstance(outcome, BaseException)
        body, buffers = self._codec.encode((type(outcome).__name__, str(outcome)) if is_error else outcome)
        with suppress(Unavailable):  # the other end does not wait for it any more
            self.connection.send(Frame(frames.ERROR if is_error else frames.RESULT, number, "", body, buffers))

    def _send(self, number: int, message: Any, payload: bytes | None = None) -> None:
        body, buffers = self._codec.encode(message)
        buffers = buffers if payload is None else (payload,)
        self.connection.send(Frame(frames.SUPERVISION, number, "", body, buffers))
