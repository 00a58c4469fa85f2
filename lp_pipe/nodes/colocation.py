"""The base of colocations: several nodes as one entry of the program."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from lp_pipe.address import Address
from lp_pipe.context import context
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


class MultiProcessingColocation(Colocation):
    """Runs each of `nodes` in a process of its own, in every launch mode; one entry in groups, status and errors.

    Any nodes may be inside, colocations too; their handles work as if they were outside. They share the label, the
    index and the resources of the colocation. An inner failure is the colocation's failure: the other inner nodes get a
    stop, and the grace period to end; then the group's `on_failure` holds for all of them together.

    num_retries_on_failure: how often each inner node is restarted before its failure counts. A colocation inside is
        retried as often as its own number and this one allow, each of its inner nodes on its own.
    """

    def __init__(self, nodes: Iterable[Node[Any]] = (), num_retries_on_failure: int = 0) -> None:
        super().__init__(nodes)
        if num_retries_on_failure < 0:
            raise ValueError(f"num_retries_on_failure must be at least 0, got {num_retries_on_failure}")
        self.num_retries_on_failure = num_retries_on_failure
        self.inner_id = ""  # set by the plan: the launcher's name for it

    def execute(self) -> None:
        """Wait for the inner nodes, which the launcher runs; only inside a MultiThreadingColocation.

        Elsewhere the plan has replaced the colocation by its inner nodes.
        """
        node = context()
        is_enough = threading.Event()
        ended = node.services.inner_nodes_ended(self.inner_id)
        ended.add_done_callback(lambda done: is_enough.set())
        node.stop_signal.add(is_enough.set)
        is_enough.wait()
        if not ended.done():
            node.services.stop_inner_nodes(self.inner_id)
