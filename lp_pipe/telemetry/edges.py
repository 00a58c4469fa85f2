"""Counters of what goes along the edges of a program: calls and their bytes, transfers and theirs.

A client and a channel's sender add two numbers each time. Threads that add at the same moment may lose one another's
addition: these are statistics.
"""

import weakref
from typing import NamedTuple

from lp_pipe.context import NodeServices, current_context


class EdgeCounter:
    """The traffic that one node of this process has sent to another since it started."""

    __slots__ = ("bytes_sent", "number")

    def __init__(self) -> None:
        self.number = 0
        self.bytes_sent = 0


class EdgeCount(NamedTuple):
    """The state of one counter.

    user: the node that calls or sends; "" for the launcher. server: the other one, or "" if only its address is known.
    number: of calls, or of transfers if `is_channel`.
    """

    user: str
    server: str
    address_id: str
    is_channel: bool
    number: int
    bytes_sent: int


_Counters = dict[tuple[str, str, str, bool], EdgeCounter]
_of_launcher: _Counters = {}
_of_nodes: "weakref.WeakKeyDictionary[NodeServices, _Counters]" = weakref.WeakKeyDictionary()


def counter_to(server: str, address_id: str = "", *, is_channel: bool = False) -> EdgeCounter:
    """Return the counter of the edge from the node that the calling thread belongs to."""
    node = current_context()
    if node is None:
        return _of_launcher.setdefault(("", server, address_id, is_channel), EdgeCounter())
    own = _of_nodes.setdefault(node.services, {})
    return own.setdefault((node.name, server, address_id, is_channel), EdgeCounter())


def edge_counts(services: "NodeServices | None") -> list[EdgeCount]:
    """Return the counters of a node, or of nodes that share its NodeServices; None: of this process's other threads."""
    counters = _of_launcher if services is None else _of_nodes.get(services, {})
    return [EdgeCount(*key, counter.number, counter.bytes_sent) for key, counter in list(counters.items())]
