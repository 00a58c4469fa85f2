"""Framed duplex connections: one interface, a carrier for each way between two nodes."""

from types import ModuleType

from lp_pipe.connections import inproc, local, tcp_endpoint, unix
from lp_pipe.connections.base import Connection as Connection
from lp_pipe.connections.base import Listener as Listener
from lp_pipe.connections.base import OnConnection
from lp_pipe.connections.base import PulledConnection as PulledConnection
from lp_pipe.connections.frames import Frame as Frame
from lp_pipe.errors import Unavailable

_CARRIERS: dict[str, ModuleType] = {inproc.SCHEME: inproc, local.SCHEME: local, unix.SCHEME: unix}


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a listener; the endpoint's scheme chooses the carrier.

    Raises:
        Unavailable: nobody listens there.
    """
    found: Connection = _carrier(endpoint).connect(endpoint, idle_timeout_s)
    return found


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    """Accept connections; `on_connection` is called with each and must start it."""
    found: Listener = _carrier(endpoint).listen(endpoint, on_connection)
    return found


def _carrier(endpoint: str) -> ModuleType:
    scheme = endpoint[: endpoint.find(":") + 1]
    if scheme in tcp_endpoint.SCHEMES:
        from lp_pipe.connections import grpc_stream  # grpc is slow to import, and must not be there before a fork

        return grpc_stream
    if scheme not in _CARRIERS:
        known = ", ".join([*_CARRIERS, *tcp_endpoint.SCHEMES])
        raise Unavailable(f"endpoint {endpoint!r} has no known carrier; known are {known}")
    return _CARRIERS[scheme]
