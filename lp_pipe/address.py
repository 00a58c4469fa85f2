"""The address of a server: a name at setup, "host:port" in a running node."""

import re
import uuid
from typing import Protocol

from lp_pipe.context import current_context

_NAME = re.compile(r"[a-z][a-z0-9]*")


class _Owner(Protocol):
    @property
    def addresses(self) -> list["Address"]: ...


class Address:
    """A place where a server of the program will listen.

    A CourierNode owns one for its calls. For a server of your own, create an Address, `assign` it to the node
    that will listen on it, and `resolve` it inside any node to "host:port".
    """

    def __init__(self, name: str | None = None) -> None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError(f"address name {name!r} must match [a-z][a-z0-9]* (lower-case letters, then digits)")
        self.name = name
        self.id = uuid.uuid4().hex[:16]
        self._owner: _Owner | None = None

    def assign(self, node: _Owner) -> None:
        """Make `node` the one that listens here.

        Raises:
            ValueError: another node already owns this address.
        """
        if self._owner is node:
            return
        if self._owner is not None:
            raise ValueError(f"{self!r} is already assigned to {self._owner!r}; give each node an address of its own")
        self._owner = node
        node.addresses.append(self)

    def resolve(self) -> str:
        """Return "host:port", with the port reserved for this program and free to bind.

        Every node gets the same answer. Nothing but the server of the owner's code may listen there.

        Raises:
            RuntimeError: the address was never assigned to a node, this is no running node, or no port is free.
        """
        node = current_context()
        if node is not None:
            return node.services.reserve_port(self.id)
        if self._owner is None:
            raise RuntimeError(
                f"{self!r} must be assigned before launch to the node that will listen there: call address.assign(node)"
            )
        raise RuntimeError(f"{self!r}.resolve() only works inside a running node of a launched program")

    def __repr__(self) -> str:
        return f"Address({self.name or self.id})"

    def __getstate__(self) -> dict[str, object]:
        # Without the owner: an address is sent to many nodes, and must not take its server's arguments along.
        return {"name": self.name, "id": self.id, "_owner": None}


def get_port_from_address(address: str) -> int:
    """Return the port of "host:port"."""
    return int(address.rsplit(":", 1)[1])
