"""The local address from which this host reaches another, by the routing table and without sending anything."""

import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def local_address_towards(host: str) -> str:
    """Return the address of this host from which `host` is reached.

    Raises:
        OSError: there is no route to it.
    """
    family, kind, proto, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return whether the address, in numbers, is a loopback one; a host name is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
