"""Framed duplex connections: one interface, a carrier for each way between two nodes."""

from collections.abc import Callable
from types import ModuleType

from lp_pipe.connections import inproc, local, spanning, tcp_endpoint, unix
from lp_pipe.connections.base import Connection as Connection
from lp_pipe.connections.base import Listener as Listener
from lp_pipe.connections.base import OnConnection
from lp_pipe.connections.base import PulledConnection as PulledConnection
from lp_pipe.connections.frames import Frame as Frame
from lp_pipe.errors import Unavailable

Connector = Callable[[str, float | None], Connection]

_CARRIERS: dict[str, ModuleType] = {
    inproc.SCHEME: inproc,
    local.SCHEME: local,
    unix.SCHEME: unix,
    **dict.fromkeys(spanning.SCHEMES, spanning),
}


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a listener; the endpoint's scheme chooses the carrier.

    Raises:
        Unavailable: nobody listens there.
    """
    return _connector(endpoint, idle_timeout_s)


def use_connector(connector: Connector | None) -> None:
    """Let `connect` ask `connector` from now on, which may call `connect_directly`; None: the usual one."""
    global _connector
    _connector = connector or connect_directly


def current_connector() -> Connector:
    """Who makes connections now."""
    return _connector


def connect_directly(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """What `connect` does when nothing was put in between."""
    found: Connection = _carrier(endpoint).connect(endpoint, idle_timeout_s)
    return found


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    """Accept connections; `on_connection` is called with each and must start it."""
    found: Listener = _carrier(endpoint).listen(endpoint, on_connection)
    return found


def is_endpoint(text: object) -> bool:
    """Whether a carrier goes there; whoever waits until somebody listens would wait for ever otherwise."""
    return isinstance(text, str) and _scheme(text) in [*_CARRIERS, *tcp_endpoint.SCHEMES]


def is_here(endpoint: str) -> bool:
    """Tell whether clients of this process reach the endpoint's listener without leaving it."""
    return endpoint.startswith(inproc.SCHEME) or local.is_inside(endpoint)


def _carrier(endpoint: str) -> ModuleType:
    scheme = _scheme(endpoint)
    if scheme == tcp_endpoint.TLS:
        from lp_pipe.connections import tls  # of no use to most processes

        return tls
    if scheme in tcp_endpoint.GRPC_SCHEMES:
        from lp_pipe.connections import grpc_stream  # grpc is slow to import, and must not be there before a fork

        return grpc_stream
    if scheme not in _CARRIERS:
        known = ", ".join([*_CARRIERS, *tcp_endpoint.SCHEMES])
        raise Unavailable(f"endpoint {endpoint!r} has no known carrier; known are {known}")
    return _CARRIERS[scheme]


def _scheme(endpoint: str) -> str:
    return endpoint[: endpoint.find(":") + 1]


_connector: Connector = connect_directly
