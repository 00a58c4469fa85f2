"""A server for its own process, by calls, and for others of its host, over a unix socket."""

from lp_pipe.connections import inproc, unix
from lp_pipe.connections.base import Connection, Listener, OnConnection

SCHEME = "local:"


class LocalListener(Listener):
    def __init__(self, endpoint: str, on_connection: OnConnection) -> None:
        self.endpoint = endpoint
        self._inproc = inproc.listen(_inside(endpoint), on_connection)
        try:
            self._unix = unix.listen(_outside(endpoint), on_connection)
        except BaseException:
            self._inproc.close()
            raise

    def close(self, reason: str = "closed") -> None:
        self._inproc.close(reason)
        self._unix.close(reason)


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a listener of this process or of another one of this host.

    Raises:
        Unavailable: nothing listens there, or the listener belongs to another user.
    """
    if is_same_process(endpoint):
        return inproc.connect(_inside(endpoint), idle_timeout_s)
    return unix.connect(_outside(endpoint), idle_timeout_s)


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    return LocalListener(endpoint, on_connection)


def is_same_process(endpoint: str) -> bool:
    """Return whether this process is the one that listens there."""
    return endpoint.startswith(SCHEME) and inproc.is_listening(_inside(endpoint))


def _inside(endpoint: str) -> str:
    return inproc.SCHEME + endpoint.removeprefix(SCHEME)


def _outside(endpoint: str) -> str:
    return unix.SCHEME + endpoint.removeprefix(SCHEME)
