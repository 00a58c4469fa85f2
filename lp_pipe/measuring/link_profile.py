"""Measurement of the links between hosts, by calls between nodes on them. Needs no torch."""

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.errors import PartitionError
from lp_pipe.handles import CourierHandle
from lp_pipe.launch import launch
from lp_pipe.nodes import CourierNode
from lp_pipe.pipeline.partitioning.topology import Level, Topology
from lp_pipe.program import Program
from lp_pipe.resources import Resources

_LARGE_BYTES = 16 << 20
_SMALL_CALLS = 30
_LARGE_CALLS = 5
_PATIENCE_S = 600.0  # for 16 MiB each way


class HostLink(NamedTuple):
    """The link between a process of `sender` and one of `receiver`.

    latency: seconds, one way. bandwidth: bytes per second, both ways together while as much goes each way, as a plan's
    cost model counts it.
    """

    sender: str
    receiver: str
    latency: float
    bandwidth: float


def measure_links(hosts: Sequence[str], /, **options: Any) -> list[HostLink]:
    """Measure the links within each host, and then between each host and the next one, and the first.

    Within a host the link is that between two processes.
    hosts: names that the engine knows. options: of `launch`, such as engine=, and its own hosts=.
    One link at a time, both ways at once, with nothing else of ours on it. Arrays take the way of a call's: through
    shared memory in a host, in a stream with mTLS between hosts. So it is the bandwidth that a program gets, not that
    of the cable.

    Raises: as `launch`.
    """
    program = Program("links")
    probes: dict[str, list[CourierHandle]] = {}
    for place, host in enumerate(hosts):
        with program.group(f"host{place}", resources=Resources(host=host)):
            probes[host] = [program.add_node(CourierNode(Probe)) for _ in range(2)]
    ring: list[tuple[str, str]] = [*pairwise(hosts), *([(hosts[-1], hosts[0])] if len(hosts) > 2 else [])]
    pairs = [(host, host, probes[host][0], probes[host][1]) for host in hosts]
    pairs += [(sender, receiver, probes[sender][0], probes[receiver][0]) for sender, receiver in ring]
    with launch(program, "multi_host", **options) as run:
        found = []
        for sender, receiver, probe, other in pairs:
            latency, bandwidth = run.client(probe).measure(run.client(other))
            found.append(HostLink(sender, receiver, latency, bandwidth))
    return found


class Probe:
    """The node of a link's measurement on one host."""

    def take(self, data: np.ndarray[Any, Any]) -> None:
        """Receive the data."""

    def give(self, size: int) -> np.ndarray[Any, Any]:
        """Send so many bytes."""
        return np.zeros(size, np.uint8)

    def measure(self, other: Any) -> tuple[float, float]:
        """Return the median latency to another probe, and the median bandwidth of both ways at once."""
        small, large = np.zeros(1, np.uint8), np.zeros(_LARGE_BYTES, np.uint8)

        def exchange() -> None:
            calls = [other.futures.take(large), other.futures.give(_LARGE_BYTES)]
            for call in calls:
                call.result(_PATIENCE_S)

        exchange()  # connections and memory are warm from now on
        latency = _median_s(lambda: other.take(small), _SMALL_CALLS) / 2
        seconds = _median_s(exchange, _LARGE_CALLS)
        return latency, 2 * _LARGE_BYTES / max(seconds - 2 * latency, 1e-9)


def topology_of(links: Sequence[HostLink], devices_per_host: int) -> Topology:
    """Return a topology of two levels, or one where there is one host; the slowest link of each decides.

    Raises:
        PartitionError: there are no links, or no devices.
    """
    if not links:
        raise PartitionError("no link was measured: name at least one host")
    inside = [link for link in links if link.sender == link.receiver]
    between = [link for link in links if link.sender != link.receiver]
    levels = [_level("device", devices_per_host, inside)]
    if between:
        levels.append(_level("host", len(inside), between))
    return Topology(tuple(levels))


def _level(name: str, count: int, links: Sequence[HostLink]) -> Level:
    return Level(name, count, min(link.bandwidth for link in links), max(link.latency for link in links))


def _median_s(call: Any, times: int) -> float:
    seconds = []
    for _ in range(times):
        start = time.monotonic()
        call()
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds)
