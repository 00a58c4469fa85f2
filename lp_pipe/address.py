"""A name at setup, an endpoint after the launcher has bound it."""

import re
import uuid
from typing import Protocol

from lp_pipe.context import context

_NAME = re.compile(r"[a-z][a-z0-9]*")


class _Owner(Protocol):
    @property
    def addresses(self) -> list["Address"]: ...


class Address:
    """Where a server of the program will listen.

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

        Raises:
            RuntimeError: outside a launched program, or the address was never assigned to a node.
        """
        return context().services.reserve_port(self.id)

    def __repr__(self) -> str:
        return f"Address({self.name or self.id})"

    def __getstate__(self) -> dict[str, object]:
        # The owner stays behind: an address travels to many nodes, and must not drag its server's arguments along.
        return {"name": self.name, "id": self.id, "_owner": None}


def get_port_from_address(address: str) -> int:
    """Return the port of "host:port"."""
    return int(address.rsplit(":", 1)[1])
