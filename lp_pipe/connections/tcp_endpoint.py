"""Endpoints over TCP: `tls:HOST:PORT`; `grpc:HOST:PORT`, plain and on this host only; `grpcs:HOST:PORT`, with mTLS.

`grpc:HOST:PORT#TOKEN` is a listener with a token of its own in place of the run's: any process that is told the token
may connect.
"""

import ipaddress
import re
from typing import NamedTuple

from lp_pipe.errors import Unavailable

PLAIN, SECURE, TLS = "grpc:", "grpcs:", "tls:"
GRPC_SCHEMES = (PLAIN, SECURE)
SCHEMES = (*GRPC_SCHEMES, TLS)

_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[\da-fA-F:]+\]):\d+")

# The reason of a TCP connection that ended without one.
GONE = "the connection ended without a reason (the peer's process ended or was killed, or its host is unreachable)"


class TcpEndpoint(NamedTuple):
    """A parsed endpoint. `str` leaves the token out, for messages and logs.

    scheme: PLAIN, SECURE or TLS. bind: where a listener binds, if that differs from the host by which others reach it.
    """

    scheme: str
    host: str
    port: int
    bind: str = ""
    token: str = ""

    @property
    def is_secure(self) -> bool:
        return self.scheme != PLAIN

    @property
    def target(self) -> str:
        """The "host:port" that a client connects to."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def bind_target(self) -> str:
        """The "host:port" that a listener binds."""
        return f"{bracketed(self.bind or self.host)}:{self.port}"

    @property
    def with_token(self) -> str:
        """The endpoint that a client is given."""
        return f"{self}#{self.token}" if self.token else str(self)

    def __str__(self) -> str:
        return f"{self.scheme}{self.target}"


def parse(endpoint: str) -> TcpEndpoint:
    """Parse `SCHEME:HOST:PORT`, or `SCHEME:HOST@BIND:PORT` for a listener that others reach as HOST.

    Only a plain endpoint may have a token: with mTLS the run's credentials decide.

    Raises:
        ValueError: it is no such endpoint, or a plain one that others on the network could read.
    """
    endpoint, _, token = endpoint.partition("#")
    scheme = endpoint[: endpoint.find(":") + 1]
    hosts, _, port = endpoint.removeprefix(scheme).rpartition(":")
    host, _, bind = hosts.partition("@")
    if scheme not in SCHEMES or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{endpoint!r} must be tls:HOST:PORT, grpc:HOST:PORT or grpcs:HOST:PORT")
    found = TcpEndpoint(scheme, host.strip("[]"), int(port), bind.strip("[]"), token)
    if found.is_secure and token:
        raise ValueError(f"{endpoint}: an endpoint with mTLS has no token of its own")
    if not found.is_secure and not (_is_loopback(found.host) and _is_loopback(found.bind or found.host)):
        raise ValueError(f"{endpoint}: grpc: is not encrypted and only for 127.0.0.1; use {TLS}{hosts}:{port}")
    if _is_wildcard(found.host):
        raise ValueError(f"{endpoint} does not say how others reach this host; use {scheme}NAME@{hosts}:{port}")
    return found


def as_endpoint(text: str) -> str:
    """Return "grpc:HOST:PORT" for "HOST:PORT", and any other text as it is."""
    return f"{PLAIN}{text}" if _HOST_AND_PORT.fullmatch(text) else text


def parse_to_connect(endpoint: str) -> TcpEndpoint:
    """Parse like `parse`, for a client.

    Raises:
        Unavailable: it is no such endpoint, or a plain one of another host.
    """
    try:
        return parse(endpoint)
    except ValueError as error:
        raise Unavailable(str(error)) from error


def bracketed(host: str) -> str:
    """Return the host as it is written before a port: an IPv6 address, which has colons of its own, in brackets."""
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _is_wildcard(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_unspecified


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the parsed address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
