"""Ports for servers that users bind themselves: reserved before the server exists, by address."""

import socket
import threading
from collections.abc import Iterable


class Ports:
    """Thread-safe."""

    def __init__(self) -> None:
        self._reserved: dict[str, str] = {}
        self._lock = threading.Lock()

    def reserve(self, address: str) -> str:
        """A "host:port" that nobody uses, the same for every asker."""
        with self._lock:
            if address not in self._reserved:
                self._reserved[address] = f"127.0.0.1:{_free_port(self._reserved.values())}"
            return self._reserved[address]


def _free_port(taken: Iterable[str]) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if f"127.0.0.1:{port}" not in taken:
            return port
