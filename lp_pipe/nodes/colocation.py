"""The base of colocations: several nodes as one entry of the program."""

from collections.abc import Iterable, Iterator
from typing import Any

from lp_pipe.address import Address
from lp_pipe.handles import Handle, NoClientHandle
from lp_pipe.nodes.base import HandleT, Node


class Colocation(Node[NoClientHandle]):
    """A node that holds other nodes; how they run is up to the subclass."""

    def __init__(self, nodes: Iterable[Node[Any]]) -> None:
        super().__init__(type(self))  # the base class needs a function, which is never called here
        self._children: list[Node[Any]] = []
        for node in nodes:
            self._take(node)

    def add_node(self, node: Node[HandleT]) -> HandleT:
        """Add `node` and return a handle of it.

        Raises:
            TypeError: it is no node.
            ValueError: the node is in a program or colocation already.
        """
        self._take(node)
        return node.create_handle()

    @property
    def children(self) -> list[Node[Any]]:
        """The inner nodes, in order."""
        return self._children

    def check(self) -> None:
        """Refuse to run without inner nodes.

        Raises:
            ValueError: there are none.
        """
        if not self._children:
            raise ValueError(f"colocation {self.name} must have at least one node")

    @property
    def addresses(self) -> list[Address]:
        for child in self._children:
            self._addresses += [address for address in child.addresses if address not in self._addresses]
        return self._addresses

    def placed(self, label: str, index: int) -> None:
        super().placed(label, index)
        for child in self._children:
            child.placed(label, index)

    def check_arguments(self) -> None:
        for child in self._children:
            child.check_arguments()

    def input_handles(self) -> Iterator[Handle[Any]]:
        for child in self._children:
            yield from child.input_handles()

    def launch_parts(self) -> list[tuple[str, Any]]:
        named = [(index, part) for index, child in enumerate(self._children) for part in child.launch_parts()]
        return [(f"{self.path_to(index)}: {name}", part) for index, (name, part) in named]

    def path_to(self, index: int) -> str:
        """Return what errors call an inner node."""
        return f"nodes[{index}] ({self._children[index]!r})"

    def _take(self, node: Node[Any]) -> None:
        if not isinstance(node, Node):
            raise TypeError(f"a colocation takes nodes such as PyNode(f), not {node!r} of type {type(node).__name__}")
        if node.label or node.is_colocated:
            raise ValueError(f"{node!r} is already in a program or colocation; make a second node")
        node.is_colocated = True
        self._children.append(node)
        if self.label:
            node.placed(self.label, self.index)

    def _new_handle(self) -> NoClientHandle:
        return NoClientHandle()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._children})"
