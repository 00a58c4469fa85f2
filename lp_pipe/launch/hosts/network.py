"""The addresses by which hosts may be reached."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from lp_pipe.connections.routes import local_address_towards
from lp_pipe.connections.tcp_endpoint import bracketed

_SIOCGIFADDR = 0x8915
_IPV6_TABLE = Path("/proc/net/if_inet6")
_ANYWHERE = "192.0.2.1"  # an address of no host (RFC 5737), which the default route leads to


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
    seen = f"{bracketed(client)}:{port}"
    # Other hosts could not reach this one at a loopback address.
    return [*addresses, seen] if ipaddress.ip_address(client).is_loopback else [seen, *addresses]


def address_of_interface(name: str) -> str:
    """The address that is meant by an interface's name; an address of this host, or a name of it, is meant as it is.

    IPv4 is preferred; an interface without gives its IPv6 address of the widest scope, if that is more than the link's.

    Raises:
        OSError: this host has no such interface, or that has no address.
    """
    interfaces = [interface for _, interface in socket.if_nameindex()]
    if name not in interfaces:
        return _own(name, interfaces)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    found = _ipv6_addresses(name)
    if not found:
        raise OSError(f"interface {name} of host {socket.gethostname()} has no address that other hosts could use")
    return found[0]


def _own(name: str, interfaces: Sequence[str]) -> str:
    """`name`, if it is an address of this host."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(where)
    except OSError as error:
        has = ", ".join(interfaces)
        raise OSError(
            f"--interface={name}: host {socket.gethostname()} has no such interface (it has {has}), and no address of "
            f"that name ({error.strerror})"
        ) from error
    return name


def _ipv6_addresses(interface: str) -> list[str]:
    """Return the addresses that are not link-local; a line has address, index, prefix, scope, flags, interface."""
    try:
        lines = _IPV6_TABLE.read_text().splitlines()
    except OSError:  # no Linux, or no IPv6
        return []
    fields = [line.split() for line in lines]
    found = [ipaddress.IPv6Address(bytes.fromhex(address)) for address, *_, name in fields if name == interface]
    return [str(address) for address in found if not address.is_link_local]
