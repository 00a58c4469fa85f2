"""The way from a client to its server, wherever that is, and again after the server was restarted."""

import socket
import threading
import time

from lp_pipe import connections
from lp_pipe.connections import Connection, inproc, io_thread, run_endpoints, tcp_liveness
from lp_pipe.connections.finalizer import add_finalizer
from lp_pipe.errors import Unauthenticated, Unavailable
from lp_pipe.launched import caused_by_first_failure, services_for
from lp_pipe.private_python import release_if_held_here
from lp_pipe.rpc.client_connection import ClientConnection
from lp_pipe.rpc.deadlines import too_late
from lp_pipe.rpc.fork_guard import ForkGuard
from lp_pipe.telemetry import waits

_RECONNECT_PAUSE_S = 0.02
_OUT_OF_REACH_S = 10.0  # longer than a lost host counts as up (host_timeout)


class Reconnector:
    """The connections of one client, made with its options; they close when the client is freed."""

    def __init__(
        self,
        address: str,
        call_timeout_s: float | None,
        wait_for_ready: bool,
        address_id: str | None,
        peer: str,
        depth: int = 0,
    ) -> None:
        self._address = address
        self._call_timeout_s = call_timeout_s
        self._wait_for_ready = wait_for_ready
        self._address_id = address_id
        self._peer = peer
        self.target = waits.Target(address, address_id or "", peer)
        self._connection: ClientConnection | None = None
        self._lock = threading.RLock()  # a thread takes it once: each depth of nesting has an object of its own
        self._fork_guard = ForkGuard()  # for the lock
        self._depth = depth
        self._inner: dict[int, Reconnector] = {}  # by depth of nesting
        self.services = services_for(address_id) if address_id is not None else None

    def at_depth(self, depth: int) -> "Reconnector":
        """Return the object for operations of this depth (see `nesting`), which has a connection of its own."""
        if not depth:
            return self
        found = self._inner.get(depth)
        if found is None:
            options = (self._address, self._call_timeout_s, self._wait_for_ready, self._address_id, self._peer)
            found = self._inner.setdefault(depth, Reconnector(*options, depth))
        return found

    def recover(self) -> None:
        """Undo what an interrupted operation of the calling thread has left half done."""
        if self._fork_guard.is_here:
            release_if_held_here(self._lock)
        if self._connection is not None:
            self._connection.recover()
        if not self._depth:  # otherwise an operation further down on the stack may hold these
            io_thread.shared.recover()
            tcp_liveness.shared.recover()

    def open_connection(self) -> ClientConnection | None:
        """Return the existing connection if it is open."""
        connection = self._connection
        return connection if connection is not None and connection.is_open() else None

    def connected(self, method: str, deadline: float | None) -> ClientConnection:
        """Return the open connection, or a new one as soon as the server is there.

        Raises:
            DeadlineExceeded, Unavailable: errors of the call of this method.
        """
        connection = self.open_connection()
        if connection is not None:
            return connection
        with waits.waiting(waits.RESOLVE, self.target, method, deadline is not None):
            return self._newly_connected(method, deadline)

    def _newly_connected(self, method: str, deadline: float | None) -> ClientConnection:
        # a thread that was connecting at the fork would hold the lock in the child for ever
        if not self._fork_guard.is_here:
            self._lock, self._fork_guard = threading.RLock(), ForkGuard()
        # Another thread may hold the lock for as long as the server takes to come up, which must not outlast our
        # deadline.
        if not self._lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise too_late(self._peer, method, self._call_timeout_s)
        try:
            if self._connection is None or not self._connection.is_open():
                self._connection = ClientConnection(self._connect(method, deadline), self._depth)
                # Clients come and go (each that travels through a call is a new one); their connections must not stay.
                add_finalizer(self, self._connection.drop)
            return self._connection
        finally:
            self._lock.release()

    def _connect(self, method: str, deadline: float | None) -> Connection:
        tried_since: dict[str, float] = {}  # by registered endpoint
        while True:
            try:
                return connections.connect(self._address)
            except Unavailable as error:
                is_in_vain = isinstance(error, Unauthenticated) or inproc.is_of_other_process(self._address)
                if is_in_vain or not self._wait_for_ready:
                    raise type(error)(f"{self._peer}.{method}(): {error}") from error
                why = str(error)
            endpoint = self._wait_until_up(method, deadline)
            since = tried_since.setdefault(endpoint, time.monotonic())
            if run_endpoints.is_other_host(endpoint) and time.monotonic() - since > _OUT_OF_REACH_S:
                # Both hosts are alive and reach the launcher: only the path between them is missing.
                raise Unavailable(
                    f"{self._peer}.{method}(): the server is up, but unreachable from host {socket.gethostname()} for "
                    f"{_OUT_OF_REACH_S:g} s: {why}"
                )

    def _wait_until_up(self, method: str, deadline: float | None) -> str:
        """Return the endpoint that the server has registered; "" if there is no launcher to ask."""
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise too_late(self._peer, method, self._call_timeout_s)
        endpoint = ""
        if self.services is not None and self._address_id is not None:
            try:
                endpoint = self.services.resolve(self._address_id).result(remaining)
            except Unavailable as error:
                raise caused_by_first_failure(self.services, error, f"{self._peer}.{method}(): {error}") from error
            except TimeoutError:
                raise too_late(self._peer, method, self._call_timeout_s) from None
        # Registered but not reachable (it has just died), or no coordinator to ask: try again in a moment.
        time.sleep(_RECONNECT_PAUSE_S if remaining is None else min(_RECONNECT_PAUSE_S, remaining))
        return endpoint
