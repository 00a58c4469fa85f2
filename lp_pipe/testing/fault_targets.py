"""Which nodes of a running program a test means, and how they are connected."""

import contextlib
import time
from typing import Any

from lp_pipe.connections import fault_injection
from lp_pipe.errors import Unavailable
from lp_pipe.handles import Handle
from lp_pipe.launch import Run
from lp_pipe.nodes import Node
from lp_pipe.protos import supervision_pb2 as wire

# A label is the whole group, (label, index) or a handle one node of it.
Nodes = str | tuple[str, int] | Handle[Any]

LAUNCHER = "(launcher)"  # the test itself, with the clients that it got from `run.client`
EVERYONE = "(everyone)"


def node_ids(run: Run, nodes: Nodes) -> list[str]:
    """The "label/index" of each; "" for the launcher.

    Raises:
        KeyError, IndexError: no such group, or not so many nodes in it.
        ValueError: a handle of another program.
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
        raise KeyError(f"no group {label!r} in this program; it has {known}")
    if index is not None and not 0 <= index < len(group):
        raise IndexError(f"group {label!r} has {len(group)} nodes; there is no index {index}")
    return [f"{label}/{number}" for number in (range(len(group)) if index is None else [index])]


def ways_between(run: Run, source: Nodes, target: Nodes) -> list[wire.Fault.Way]:
    """How messages get from the ones to the others: whoever listens is connected to.

    Raises:
        ValueError: neither side listens, or they are one node: there will never be a message.
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
        raise ValueError(f"{source!r} and {target!r} are never connected: neither of them serves calls or channels")
    return ways


def wait_until_up(run: Run, node_id: str, patience_s: float) -> None:
    """Until all servers of the node listen, if they ever do; a client of one that does not yet would wait for it."""
    deadline = time.monotonic() + patience_s
    for address in _node(run, node_id).addresses:
        with contextlib.suppress(Unavailable, TimeoutError):
            run._coordinator.resolve(address.id).result(max(0.0, deadline - time.monotonic()))


def _all(run: Run) -> list[str]:
    return [f"{label}/{index}" for label, rows in run.status().items() for index in range(len(rows))]


def _by_handle(run: Run, handle: Handle[Any]) -> str:
    if handle.node_name not in _all(run):
        raise ValueError(f"{handle!r} is a handle of another program")
    return handle.node_name


def _endpoints(run: Run, node_id: str) -> list[str]:
    if node_id == fault_injection.LAUNCHER:
        return []
    return [run._coordinator.endpoint_for(address.id) for address in _node(run, node_id).addresses]


def _node(run: Run, node_id: str) -> Node[Any]:
    label, _, index = node_id.rpartition("/")
    return run._program.groups[label][int(index)]
