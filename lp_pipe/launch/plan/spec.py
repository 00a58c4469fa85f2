"""The description of one process or thread of a program, before it starts."""

from dataclasses import dataclass
from typing import Any

from lp_pipe.nodes import Node
from lp_pipe.resources import Resources


@dataclass(frozen=True)
class NodeSpec:
    """A process or thread to start.

    node_id: `label/index`; of a process inside a MultiProcessingColocation `label/index.place`, with one more number
        for each colocation inside a colocation.
    addresses: the ids of the addresses where it listens.
    least_nodes: if not 0, a failure is ignored as long as so many other nodes of the group are left.
    least_started: if not 0, only so many nodes of the group must have room at the start; the others wait for hosts that
        join later, as do nodes of the group that are down after a failure.
    path: the prefix for the path to a part of an inner node, in errors: "nodes[1] (PyNode(f)): ".
    retries: how often it may fail and be started again before its failure counts as the node's.
    """

    node_id: str
    label: str
    index: int
    group_size: int
    node: Node[Any]
    resources: Resources
    addresses: tuple[str, ...] = ()
    on_failure: str = "stop"
    max_restarts: int | None = 0
    on_hang: str = "report"
    least_nodes: int = 0
    least_started: int = 0
    path: str = ""
    retries: int = 0

    @property
    def name(self) -> str:
        """`label/index`: the name of the program's node that this is, or is a part of."""
        return f"{self.label}/{self.index}"

    @property
    def is_inner(self) -> bool:
        """Whether it is inside a MultiProcessingColocation, and so a process in every mode."""
        return self.node_id != self.name

    @property
    def may_wait(self) -> bool:
        """Whether the program begins without it where there is no room."""
        return 0 < self.least_started <= self.index

    @property
    def may_start_again(self) -> bool:
        return "restart" in (self.on_failure, self.on_hang) or self.retries > 0
