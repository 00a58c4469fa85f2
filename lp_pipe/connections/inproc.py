"""Connections within one process: a frame is delivered by a call, and no bytes are sent."""

import os
import threading
from collections import deque

from lp_pipe.connections.base import Connection, Listener, OnClose, OnConnection, OnFrame
from lp_pipe.connections.frames import Frame
from lp_pipe.errors import Unavailable

SCHEME = "inproc:"

_listeners: dict[str, "InprocListener"] = {}
_listeners_lock = threading.Lock()


class InprocConnection(Connection):
    """A connection that calls the peer's `on_frame` in the sender's thread.

    Bytes-like buffers are copied, so that the peer never sees later writes of the sender; other objects (tensors of a
    channel, classes) pass by reference.
    """

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self._other: InprocConnection | None = None
        self._on_frame: OnFrame | None = None
        self._early: deque[Frame] = deque()
        self._early_lock = threading.Lock()

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        while True:
            with self._early_lock:
                if not self._early:
                    self._on_frame = on_frame
                    break
                frame = self._early.popleft()
            on_frame(frame)
        self._attach(on_close)

    def is_same_process(self) -> bool:
        return True

    def send(self, frame: Frame) -> None:
        other = self._other
        if self._closed_reason is not None or other is None:
            raise Unavailable(f"connection to {self.peer} is closed: {self._closed_reason}")
        if frame.buffers:
            frame = frame._replace(buffers=[_own(buffer) for buffer in frame.buffers])
        if other._on_frame is None:
            with other._early_lock:
                if other._on_frame is None:
                    other._early.append(frame)
                    return
        other._on_frame(frame)

    def close(self, reason: str = "closed") -> None:
        other, self._other = self._other, None
        self._mark_closed(reason)
        if other is not None:
            other._mark_closed(reason)


class InprocListener(Listener):
    def __init__(self, endpoint: str, on_connection: OnConnection) -> None:
        self.endpoint = endpoint
        self.on_connection = on_connection
        with _listeners_lock:
            _listeners[endpoint] = self

    def close(self, reason: str = "closed") -> None:
        with _listeners_lock:
            if _listeners.get(self.endpoint) is self:
                del _listeners[self.endpoint]


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a listener of this process; there is no idle timeout within a process.

    Raises:
        Unavailable: nothing listens there.
    """
    listener = _listeners.get(endpoint)
    if listener is None and is_of_other_process(endpoint):
        raise Unavailable(
            f"the server is a thread of process {_process_of(endpoint)}, which cannot be reached from this process "
            f"({os.getpid()}): launch the program with mode='process' to call its nodes from processes of your own"
        )
    if listener is None:
        raise Unavailable(f"nothing listens at {endpoint}")
    near, far = pair(endpoint)
    listener.on_connection(far)
    return near


def own_endpoint(name: str) -> str:
    """Return an endpoint that names this process, so that other processes see that it is not theirs."""
    return f"{SCHEME}{os.getpid()}/{name}"


def is_of_other_process(endpoint: str) -> bool:
    """Return whether the endpoint names another process, so that nothing will ever listen there in this one."""
    return endpoint.startswith(SCHEME) and _process_of(endpoint) not in ("", str(os.getpid()))


def _process_of(endpoint: str) -> str:
    """Return the process that an endpoint of `own_endpoint` names; "" for other endpoints."""
    process, slash, _ = endpoint.removeprefix(SCHEME).partition("/")
    return process if slash and process.isdecimal() else ""


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    return InprocListener(endpoint, on_connection)


def is_listening(endpoint: str) -> bool:
    return endpoint in _listeners


def pair(name: str = "inproc:pair") -> tuple[Connection, Connection]:
    """Return two connected ends."""
    near, far = InprocConnection(name), InprocConnection(f"client of {name}")
    near._other, far._other = far, near
    return near, far


def _own(buffer: object) -> object:
    return bytearray(buffer) if isinstance(buffer, (memoryview, bytearray)) else buffer


def _leave_listeners_to_the_parent() -> None:
    """Drop the listeners in a forked process: a client would be answered by a copy of the parent's server."""
    global _listeners_lock
    _listeners_lock = threading.Lock()
    _listeners.clear()


os.register_at_fork(after_in_child=_leave_listeners_to_the_parent)
