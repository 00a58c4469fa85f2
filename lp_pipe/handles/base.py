"""The base of handles. A handle stands for a node at setup, and becomes a client of it at execution."""

from abc import ABC, abstractmethod
from typing import Any, Generic, NoReturn, TypeVar

from lp_pipe.address import Address
from lp_pipe.rpc import codec

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
