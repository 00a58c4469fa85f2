"""Several nodes as one entry of the program, in a process each (Launchpad's MultiProcessingColocation)."""

import threading
from collections.abc import Iterable
from typing import Any

from lp_pipe.context import context
from lp_pipe.nodes.base import Node
from lp_pipe.nodes.colocation import Colocation


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
