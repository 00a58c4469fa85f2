"""The traffic along each edge of a running program, from the counters of its processes."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lp_pipe.launch.supervision.messages import View


class Traffic(NamedTuple):
    """The calls, the transfers and the bytes sent from one node to another since the sending process started.

    user, server: node_ids; user is "launcher" for the launching script. Bytes are those of arguments and tensors.
    """

    user: str
    server: str
    calls: int
    transfers: int
    bytes_sent: int


def traffic_of(views: Iterable[View], owners: Mapping[str, str]) -> list[Traffic]:
    """Add up the counters by edge. owners: the node of each address."""
    sums: dict[tuple[str, str], list[int]] = {}
    for view in views:
        for edge in view.edges:
            server = owners.get(edge.address_id, edge.server)
            total = sums.setdefault((edge.user or "launcher", server), [0, 0, 0])
            total[1 if edge.is_channel else 0] += edge.number
            total[2] += edge.bytes_sent
    return [Traffic(user, server, *total) for (user, server), total in sums.items() if server and any(total)]
