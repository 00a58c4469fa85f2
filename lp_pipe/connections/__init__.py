"""Framed duplex connections: one interface, and one carrier for each kind of endpoint."""

from collections.abc import Callable
from types import ModuleType

from lp_pipe.connections import inproc, run_endpoints, same_host, tcp_carriers, tcp_endpoint, unix
from lp_pipe.connections.base import Connection as Connection
from lp_pipe.connections.base import Listener as Listener
from lp_pipe.connections.base import OnConnection
from lp_pipe.connections.base import PulledConnection as PulledConnection
from lp_pipe.connections.frames import Frame as Frame
from lp_pipe.errors import Unavailable

Connector = Callable[[str, float | None], Connection]

_CARRIERS: dict[str, ModuleType] = {
    inproc.SCHEME: inproc,
    same_host.SCHEME: same_host,
    unix.SCHEME: unix,
    **dict.fromkeys(run_endpoints.SCHEMES, run_endpoints),
}


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a listener; the endpoint's scheme chooses the carrier.

    Raises:
        Unavailable: nothing listens there.
    """
    return _connector(endpoint, idle_timeout_s)


def use_connector(connector: Connector | None) -> None:
    """Make `connect` call `connector` from now on; None restores the default.

    The connector may itself call `connect_directly`.
    """
    global _connector
    _connector = connector or connect_directly


def current_connector() -> Connector:
    """Return the function that `connect` calls."""
    return _connector


def connect_directly(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect without the function that was given to `use_connector`."""
    found: Connection = _carrier(endpoint).connect(endpoint, idle_timeout_s)
    return found


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    """Listen at the endpoint; `on_connection` is called with each accepted connection and must start it."""
    found: Listener = _carrier(endpoint).listen(endpoint, on_connection)
    return found


def is_endpoint(text: object) -> bool:
    """Return whether the text has the scheme of a carrier.

    Waiting for a listener at any other text would never end.
    """
    return isinstance(text, str) and _scheme(text) in [*_CARRIERS, *tcp_endpoint.SCHEMES]


def is_here(endpoint: str) -> bool:
    """Return whether clients of this process reach the endpoint's listener without leaving the process."""
    return endpoint.startswith(inproc.SCHEME) or same_host.is_same_process(endpoint)


def _carrier(endpoint: str) -> ModuleType:
    scheme = _scheme(endpoint)
    if scheme in tcp_endpoint.SCHEMES:
        return tcp_carriers.carrier_of(endpoint)
    if scheme not in _CARRIERS:
        known = ", ".join([*_CARRIERS, *tcp_endpoint.SCHEMES])
        raise Unavailable(f"cannot connect to {endpoint!r}: its scheme must be one of {known}")
    return _CARRIERS[scheme]


def _scheme(endpoint: str) -> str:
    return endpoint[: endpoint.find(":") + 1]


_connector: Connector = connect_directly
