"""By which address a host is reached: asked of the routing table, without sending anything."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Sequence

_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # of no host (RFC 5737): the way to it is the default route


def local_address_towards(host: str) -> str:
    """The address of this host from which `host` is reached.

    Raises:
        OSError: there is no way to it.
    """
    family, kind, proto, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def addresses_for(hosts: Iterable[str]) -> list[str]:
    """Addresses by which these hosts may reach this one, the likeliest first; no loopback, and none may be left."""
    found: dict[str, None] = {}
    for host in [*(host.rpartition("@")[2] for host in hosts), _ANYWHERE]:
        with contextlib.suppress(OSError):  # an alias that only ssh knows, or no route
            found[local_address_towards(host)] = None
    with contextlib.suppress(OSError):
        found.update(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)))
    return [address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]


def with_ssh_client(addresses: Sequence[str]) -> list[str]:
    """`addresses` ("HOST:PORT") of a launcher and, where ssh has started this process, that from which ssh came.

    It is the likeliest: the launcher knows its own addresses, but not which of them a host can reach.
    """
    client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    if not client or not addresses:
        return [*addresses]
    port = addresses[0].rpartition(":")[2]
    seen = f"[{client}]:{port}" if ":" in client else f"{client}:{port}"
    # From a loopback, others could not reach this host in turn.
    return [*addresses, seen] if ipaddress.ip_address(client).is_loopback else [seen, *addresses]


def address_of_interface(name: str) -> str:
    """The address that is meant by an interface's name; an address or a host's name is meant as it is.

    Raises:
        OSError: the interface has no IPv4 address.
    """
    if name not in (interface for _, interface in socket.if_nameindex()):
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
