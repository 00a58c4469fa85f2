"""Find the nodes that a test means, and the connections between them."""

import contextlib
import time
from typing import Any

from lp_pipe.connections import fault_injection
from lp_pipe.errors import Unavailable
from lp_pipe.handles import Handle
from lp_pipe.launch import Run
from lp_pipe.nodes import Node
from lp_pipe.protos import supervision_pb2 as wire

# A label means the whole group; (label, index) or a handle means one node.
Nodes = str | tuple[str, int] | Handle[Any]

LAUNCHER = "(launcher)"  # the test itself, with its clients from `run.client`
EVERYONE = "(everyone)"


def node_ids(run: Run, nodes: Nodes) -> list[str]:
    """Return the "label/index" of each node; "" for the launcher.

    Raises:
        KeyError, IndexError: there is no such group, or it has fewer nodes.
        ValueError: the handle belongs to another program.
    """
    if isinstance(nodes, Handle):
        return [_by_handle(run, nodes)]
    if nodes == LAUNCHER:
        return [fault_injection.LAUNCHER]
    if nodes == EVERYONE:
        return [fault_injection.LAUNCHER, *_all(run)]
    label, index = nodes if isinstance(nodes, tuple) else (nodes, None)
    group = run.status().get(label)
    if group is None:
        known = ", ".join(run.status())
        raise KeyError(f"this program has no group {label!r}; its groups are {known}")
    if index is not None and not 0 <= index < len(group):
        raise IndexError(f"group {label!r} has no node {index}: it has {len(group)} nodes")
    return [f"{label}/{number}" for number in (range(len(group)) if index is None else [index])]


def ways_between(run: Run, source: Nodes, target: Nodes) -> list[wire.Fault.Way]:
    """Return the connections, and their directions, by which messages travel from `source` to `target`.

    Raises:
        ValueError: they are never connected, because neither side listens, or both are one node.
    """
    sources, targets = node_ids(run, source), node_ids(run, target)
    pairs = [(a, b) for a in sources for b in targets if a != b]
    if not pairs:
        raise ValueError(f"{source!r} and {target!r} are never connected: they are one node")
    endpoints = {node: _endpoints(run, node) for node in {*sources, *targets}}
    ways = [
        wire.Fault.Way(node=node, endpoint=endpoint, is_outgoing=is_outgoing)
        for a, b in pairs
        for node, listener, is_outgoing in ((a, b, True), (b, a, False))
        for endpoint in endpoints[listener]
    ]
    if not ways:
        raise ValueError(f"{source!r} and {target!r} are never connected: neither side serves calls or channels")
    return ways


def wait_until_up(run: Run, node_id: str, patience_s: float) -> None:
    """Wait until all servers of the node listen, or will never do so."""
    deadline = time.monotonic() + patience_s
    for address in _node(run, node_id).addresses:
        with contextlib.suppress(Unavailable, TimeoutError):
            run._coordinator.resolve(address.id).result(max(0.0, deadline - time.monotonic()))


def _all(run: Run) -> list[str]:
    return [f"{label}/{index}" for label, rows in run.status().items() for index in range(len(rows))]


def _by_handle(run: Run, handle: Handle[Any]) -> str:
    if handle.node_name not in _all(run):
        raise ValueError(f"{handle!r} belongs to another program")
    return handle.node_name


def _endpoints(run: Run, node_id: str) -> list[str]:
    if node_id == fault_injection.LAUNCHER:
        return []
    return [run._coordinator.endpoint_for(address.id) for address in _node(run, node_id).addresses]


def _node(run: Run, node_id: str) -> Node[Any]:
    label, _, index = node_id.rpartition("/")
    return run._program.groups[label][int(index)]
