"""Calls between the launcher and an agent, both ways, over the one connection that they have."""

import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lp_pipe.connections import Connection, Frame, frames
from lp_pipe.errors import LaunchError, Unavailable
from lp_pipe.launch.supervision.peer import PendingAnswers
from lp_pipe.rpc import codec

_log = logging.getLogger(__name__)

ALIVE = "alive"  # told by both sides every second, to show that they live


class AgentLink:
    """The launcher's or the agent's end of the authenticated connection of a launcher and an agent of the same version.

    `target`'s public methods are what the other side may call, one after another, in the connection's thread: they
    must not block. One that returns a Future answers once that is done.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._target: object = None
        self._pending = PendingAnswers()

    @property
    def closed_reason(self) -> str | None:
        """The reason for which the connection was closed; None while it is open."""
        return self._pending.closed_reason

    def serve(self, target: object) -> None:
        """Let the other side call the methods of `target`; called before anything can arrive."""
        self._target = target

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the other side without an answer; nothing happens when that is gone."""
        with contextlib.suppress(Unavailable):
            self._send(0, method, args)

    def ask(self, method: str, *args: Any) -> "Future[Any]":
        """Call a method of the other side; return a future of its answer, Unavailable if that goes away before."""
        number, answer = self._pending.add()
        if not answer.done():
            try:
                self._send(number, method, args)
            except Unavailable as error:
                self._pending.settle(number, error)
        return answer

    def on_frame(self, frame: Frame) -> None:
        """Handle a call or an answer of the other side, in the connection's thread."""
        if frame.kind == frames.SUPERVISION:
            self._on_call(frame)
        elif frame.kind == frames.RESULT:
            self._pending.settle(frame.id, codec.decode(frame.body, frame.buffers))
        elif frame.kind == frames.ERROR:
            kind, text = codec.decode(frame.body, frame.buffers)
            self._pending.fail(frame.id, kind, text)

    def on_close(self, reason: str) -> None:
        """Settle all questions with Unavailable."""
        self._pending.close(reason)

    def close(self, reason: str) -> None:
        """Close the connection; the other end gets the reason."""
        self._connection.close(reason)

    def _on_call(self, frame: Frame) -> None:
        if frame.name == ALIVE:
            return
        answer = functools.partial(self._answer, frame.id) if frame.id else _ignore
        try:
            if frame.name.startswith("_"):
                raise LaunchError(f"{frame.name} is no method of {type(self._target).__name__}")
            result = getattr(self._target, frame.name)(*codec.decode(frame.body, frame.buffers))
        except Exception as error:
            if not frame.id:
                _log.exception("%s of %s failed", frame.name, type(self._target).__name__)
            answer(None, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: _pass_on(done, answer))
        else:
            answer(result, None)

    def _answer(self, number: int, result: Any, error: BaseException | None) -> None:
        with contextlib.suppress(Unavailable):
            if error is None:
                payload = codec.encode(result)
                self._connection.send(Frame(frames.RESULT, number, "", payload.body, payload.buffers))
            else:
                body = codec.encode((type(error).__name__, str(error))).body
                self._connection.send(Frame(frames.ERROR, number, "", body))

    def _send(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        payload = codec.encode(args)
        self._connection.send(Frame(frames.SUPERVISION, number, method, payload.body, payload.buffers))


def _ignore(result: Any, error: BaseException | None) -> None:
    """Drop the answer: the caller did not ask for one."""


def _pass_on(done: "Future[Any]", answer: Callable[[Any, BaseException | None], None]) -> None:
    error = done.exception()
    answer(None, error) if error is not None else answer(done.result(), None)
