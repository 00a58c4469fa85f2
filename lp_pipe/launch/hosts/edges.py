"""What it means for the edges of a program on which hosts its nodes are."""

from collections.abc import Iterable, Mapping

from lp_pipe.channels.kinds import NEAR_KINDS
from lp_pipe.launch.plan.host_placement import HostPlacement
from lp_pipe.program import Edge


def host_of(name: str, places: Mapping[str, HostPlacement]) -> str:
    """Of a node of the program, by `label/index`; all its processes are on one host."""
    return next((found.host for node_id, found in places.items() if node_id.partition(".")[0] == name), "")


def check_channels(edges: Iterable[Edge], places: Mapping[str, HostPlacement]) -> None:
    """Refuse channels that would have to reach from one host to another, and cannot.

    Raises:
        ValueError: names both ends, with their hosts.
    """
    for edge in edges:
        ends = host_of(edge.user, places), host_of(edge.server, places)
        if edge.channel in NEAR_KINDS and ends[0] != ends[1]:
            raise ValueError(
                f"channel={edge.channel!r} stays on one host, but {edge.user} is to run on {ends[0]} and {edge.server} "
                f"on {ends[1]}: use channel='auto' ('grpc' between hosts) or 'gloo', or put both on one host "
                "(Resources(host=…))"
            )
