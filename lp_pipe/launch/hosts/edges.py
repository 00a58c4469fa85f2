"""The check that no channel that stays on one host connects nodes on two hosts."""

from collections.abc import Iterable, Mapping

from lp_pipe.channels import kinds
from lp_pipe.launch.plan.host_placement import HostPlacement
from lp_pipe.program import Edge


def host_of(name: str, places: Mapping[str, HostPlacement]) -> str:
    """Return the host of a node, given as `label/index`; all its processes are on one host."""
    return next((found.host for node_id, found in places.items() if node_id.partition(".")[0] == name), "")


def check_channels_of_one_host(edges: Iterable[Edge]) -> None:
    """Refuse channels that need the certificates of a run on several hosts.

    Raises:
        ValueError: names both ends.
    """
    for edge in edges:
        if edge.channel == "tls":
            raise ValueError(
                f"channel='tls' from {edge.user} to {edge.server} needs mode='multi_host': use channel='auto', or "
                "'grpc' for a connection over TCP on one host"
            )


def check_channels(edges: Iterable[Edge], places: Mapping[str, HostPlacement], transport: str) -> None:
    """Refuse channels that cannot reach from one host to another, and those that contradict the run's transport.

    Raises:
        ValueError: names both ends, with their hosts.
    """
    for edge in edges:
        ends = host_of(edge.user, places), host_of(edge.server, places)
        if edge.channel == "tls" and transport == "grpc":
            raise ValueError(
                f"channel='tls' from {edge.user} to {edge.server} contradicts transport='grpc': use channel='auto'"
            )
        if edge.channel not in ("", "auto") and ends[0] != ends[1] and not kinds.named(edge.channel).crosses_hosts:
            raise ValueError(
                f"channel={edge.channel!r} stays on one host, but {edge.user} is to run on {ends[0]} and {edge.server} "
                f"on {ends[1]}: use channel='auto', 'tls', 'grpc' or 'gloo', or put both on one host "
                "(Resources(host=…))"
            )
