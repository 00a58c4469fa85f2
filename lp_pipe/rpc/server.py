"""Serve an object's public methods to other nodes (Launchpad's Courier server)."""

import contextlib
import difflib
import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

from lp_pipe import connections
from lp_pipe.connections import Connection, Frame, frames
from lp_pipe.context import current_context, entered
from lp_pipe.errors import MethodNotFound, Unavailable
from lp_pipe.rpc import codec, remote_error
from lp_pipe.rpc.explain import unpicklable
from lp_pipe.rpc.pool import DaemonPool

LIST_METHODS = "__list_methods__"


class Server:
    """Listens at `endpoint` from construction until `close`.

    thread_pool_size: handlers run in exactly so many threads; 0: inline, in the connection's thread (the fastest,
    for handlers that return at once).
    name: the node, for messages ("server/0").
    """

    def __init__(self, target: object, endpoint: str, *, thread_pool_size: int = 16, name: str = "") -> None:
        self._target = target
        self._name = name or type(target).__name__
        self._node = current_context()
        self._pool = DaemonPool(thread_pool_size, f"call {self._name}") if thread_pool_size else None
        self._connections: set[Connection] = set()
        self._active = 0
        self._idle = threading.Condition()
        self._is_closing = False
        self.calls = 0
        self._listener = connections.listen(endpoint, self._accept)
        self.endpoint = self._listener.endpoint

    def close(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, give those in progress `grace_s` to be answered, then close every connection."""
        with self._idle:
            self._is_closing = True
            deadline = time.monotonic() + grace_s
        self._listener.close()
        if self._pool is not None:
            for _, (connection, frame) in self._pool.discard():
                self._refuse(connection, frame)
        with self._idle:
            self._idle.wait_for(lambda: self._active == 0, max(0.0, deadline - time.monotonic()))
        for connection in list(self._connections):
            connection.close(f"{self._name} ended")
        if self._pool is not None:
            self._pool.close()

    def _accept(self, connection: Connection) -> None:
        self._connections.add(connection)
        connection.start(
            lambda frame: self._on_frame(connection, frame),
            lambda reason: self._connections.discard(connection),
        )

    def _on_frame(self, connection: Connection, frame: Frame) -> None:
        if frame.kind != frames.CALL:
            return  # a cancelled call: handlers are not interrupted, the caller has forgotten it
        if self._is_closing:
            self._refuse(connection, frame)
        elif self._pool is not None:
            self._pool.submit(self._answer, connection, frame)
        elif self._node is not None:
            with entered(self._node):
                self._answer(connection, frame)
        else:
            self._answer(connection, frame)

    def _answer(self, connection: Connection, frame: Frame) -> None:
        with self._idle:
            self._active += 1
            self.calls += 1
        try:
            self._send(connection, self._reply_to(frame))
        finally:
            with self._idle:
                self._active -= 1
                if self._is_closing:
                    self._idle.notify_all()

    def _send(self, connection: Connection, reply: Frame) -> None:
        with contextlib.suppress(Unavailable):  # the caller has gone; nobody is left to tell
            try:
                connection.send(reply)
            except frames.FrameError as error:  # the caller must not wait for a result that cannot be sent
                body = remote_error.own(remote_error.SERIALIZATION, f"the result of {self._name} is too large: {error}")
                connection.send(Frame(frames.ERROR, reply.id, body=body))

    def _reply_to(self, frame: Frame) -> Frame:
        try:
            handler = self._find(frame.name)
        except MethodNotFound as error:
            return Frame(frames.ERROR, frame.id, body=remote_error.own(remote_error.METHOD_NOT_FOUND, str(error)))
        except BaseException as error:  # a descriptor or __getattr__ of the user's
            return Frame(frames.ERROR, frame.id, body=remote_error.capture(error))
        try:
            args, kwargs = codec.decode(frame.body, frame.buffers)
        except Exception as error:  # unpickling runs the constructors of the arguments' classes
            text = f"{frame.name}(): {self._name} cannot load the arguments: {type(error).__name__}: {error}"
            return Frame(frames.ERROR, frame.id, body=remote_error.own(remote_error.SERIALIZATION, text))
        try:
            result = handler(*args, **kwargs)
        except BaseException as error:  # also SystemExit: a handler's exception goes to its caller only
            return Frame(frames.ERROR, frame.id, body=remote_error.capture(error))
        try:
            body, buffers = codec.encode(result)
        except Exception as error:
            text = str(unpicklable(f"{frame.name}() of {self._name}", [("result", result)], error))
            return Frame(frames.ERROR, frame.id, body=remote_error.own(remote_error.SERIALIZATION, text))
        return Frame(frames.RESULT, frame.id, "", body, buffers)

    def _find(self, name: str) -> Callable[..., Any]:
        if name == LIST_METHODS:
            return lambda: public_methods(self._target)
        if is_exposed(self._target, name):
            found: Callable[..., Any] = getattr(self._target, name)
            return found
        known = public_methods(self._target)
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known) or 'no public methods'}"
        raise MethodNotFound(f"{self._name} ({type(self._target).__name__}) has no public method {name!r}; {hint}")

    def _refuse(self, connection: Connection, frame: Frame) -> None:
        text = f"{frame.name}(): {self._name} is stopping and takes no more calls"
        with contextlib.suppress(Unavailable):
            connection.send(Frame(frames.ERROR, frame.id, body=remote_error.own(remote_error.UNAVAILABLE, text)))


def is_exposed(target: object, name: str) -> bool:
    """Whether callers may use it: a public callable, or `__call__`; never data, never a property."""
    if name.startswith("_") and name != "__call__":
        return False
    if isinstance(inspect.getattr_static(target, name, None), (property, functools.cached_property)):
        return False  # looking must not compute it
    return callable(getattr(target, name, None))


def public_methods(target: object) -> list[str]:
    """Sorted names of what callers may use."""
    return sorted(name for name in dir(target) if is_exposed(target, name))
