"""The base of handles. A handle stands for a node at setup, and becomes a client of it at execution."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar

from lp_pipe.address import Address
from lp_pipe.errors import Unavailable
from lp_pipe.launched import caused_by_first_failure, is_launcher_of, services_for
from lp_pipe.rpc import CourierClient, codec
from lp_pipe.telemetry import waits

ClientT = TypeVar("ClientT")


class Handle(ABC, Generic[ClientT]):
    """The object that `program.add_node` returns; other nodes that it is passed to get a client in its place."""

    channel = ""  # for a handle to which tensors are sent instead of calls: the kind of channel that was asked for

    def __init__(self) -> None:
        self.node_name = "a node that was not added to a program"

    @abstractmethod
    def dereference(self) -> ClientT:
        """Return the client: in a node at once (calls wait for the server), in the launcher once the server is up."""

    @property
    def addresses(self) -> list[Address]:
        """The addresses that a client of this handle talks to."""
        return []

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{type(self).__name__} of {self.__dict__.get('node_name')} has no {name!r}: a handle is not a client yet. "
            f"Pass it to a node as an argument, which dereferences it, or call .dereference().{name}"
        )

    def __getstate__(self) -> dict[str, Any]:
        codec.note_handle(self)
        return self.__dict__.copy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.node_name})"


class NoClientHandle(Handle[NoReturn]):
    """The handle of a node that serves nothing (PyNode)."""

    def dereference(self) -> NoReturn:
        raise NotImplementedError(
            f"{self.node_name} serves no calls, so its handle has nothing to dereference to; make it a CourierNode"
        )


class CourierHandle(Handle[CourierClient]):
    """A handle that dereferences to a CourierClient of the node's server."""

    def __init__(self, address: Address, client_kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._address = address
        self._client_kwargs = dict(client_kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "node_name":
            raise AttributeError(
                f"cannot set {name!r} of {self!r}: a handle only stands for the node, and its object would not get it. "
                "Give its class a method for that, and call it on a client"
            )
        super().__setattr__(name, value)

    @property
    def addresses(self) -> list[Address]:
        return [self._address]

    def set_client_kwargs(self, *, call_timeout: float | timedelta | None = None, wait_for_ready: bool = True) -> None:
        """Replace the options of the clients made from this handle."""
        self._client_kwargs = {"call_timeout": call_timeout, "wait_for_ready": wait_for_ready}

    def dereference(self) -> CourierClient:
        services = services_for(self._address.id)
        if services is None:
            raise RuntimeError(f"cannot dereference the handle of {self.node_name}: its program is not launched")
        if is_launcher_of(self._address.id):
            with waits.waiting(waits.RESOLVE, waits.Target("", self._address.id, self.node_name)):
                try:
                    services.resolve(self._address.id).result()
                except Unavailable as error:
                    raise caused_by_first_failure(services, error, str(error)) from error
        return self._client(services.endpoint_for(self._address.id))

    def _client(self, endpoint: str) -> CourierClient:
        return CourierClient(endpoint, **self._client_kwargs, address_id=self._address.id, peer=self.node_name)
