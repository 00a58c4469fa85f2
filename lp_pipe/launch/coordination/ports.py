"""Ports for servers that users bind themselves: reserved before the server exists, by address."""

import socket
import threading
from collections.abc import Iterable

from lp_pipe.connections.tcp_endpoint import bracketed


class Ports:
    """Thread-safe. host: the address of this host that the ports are of."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._reserved: dict[str, str] = {}
        self._lock = threading.Lock()

    def reserve(self, address: str) -> str:
        """A "host:port" that nobody uses, the same for every asker."""
        with self._lock:
            if address not in self._reserved:
                self._reserved[address] = _free_port(self._host, self._reserved.values())
            return self._reserved[address]


def _free_port(host: str, taken: Iterable[str]) -> str:
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        found = f"{bracketed(host)}:{port}"
        if found not in taken:
            return found
