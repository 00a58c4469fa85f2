"""Ports for servers that users bind themselves, reserved by address before the server exists."""

import threading

from lp_pipe.connections.tcp_endpoint import bracketed


class Ports:
    """The ports of one host. Thread-safe. host: the address of this host that users' servers are reached at."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._reserved: dict[str, str] = {}
        self._lock = threading.Lock()

    def reserve(self, address: str) -> str:
        """Return a "host:port" that no server uses, the same for every call with this address.

        Raises:
            RuntimeError: no port is free.
        """
        with self._lock:
            if address not in self._reserved:
                self._reserved[address] = f"{bracketed(self._host)}:{self._unused_port()}"
            return self._reserved[address]

    def _unused_port(self) -> int:
        import portpicker  # most programs need no port before its server exists

        taken = {int(reserved.rpartition(":")[2]) for reserved in self._reserved.values()}
        try:
            while (port := int(portpicker.pick_unused_port())) in taken:  # the server of an earlier one has not begun
                pass
        except portpicker.NoFreePortFoundError as error:
            raise RuntimeError(f"no TCP port of host {self._host} is free") from error
        return port
