"""One process or thread of a program, before it starts."""

from dataclasses import dataclass
from typing import Any

from lp_pipe.nodes import Node
from lp_pipe.resources import Resources


@dataclass(frozen=True)
class NodeSpec:
    """One process or thread to start.

    node_id: `label/index`; of a process inside a MultiProcessingColocation `label/index.place`, and so on for each
        colocation inside a colocation.
    path: what an error says before the path to a part of an inner node: "nodes[1] (PyNode(f)): ".
    retries: how often it may fail before its failure is the node's.
    """

    node_id: str
    label: str
    index: int
    group_size: int
    node: Node[Any]
    resources: Resources
    addresses: tuple[str, ...] = ()
    on_failure: str = "stop"
    max_restarts: int = 0
    on_hang: str = "report"
    path: str = ""
    retries: int = 0

    @property
    def name(self) -> str:
        """`label/index`: the node of the program that it is, or is a part of."""
        return f"{self.label}/{self.index}"

    @property
    def is_inner(self) -> bool:
        """Whether it is a process inside a MultiProcessingColocation, in every mode."""
        return self.node_id != self.name

    @property
    def may_start_again(self) -> bool:
        return "restart" in (self.on_failure, self.on_hang) or self.retries > 0
