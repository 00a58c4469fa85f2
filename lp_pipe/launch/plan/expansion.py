"""What runs for one node of a program: the node itself, or the inner nodes of a MultiProcessingColocation."""

import dataclasses
from collections.abc import Iterator

from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.nodes import Colocation, MultiProcessingColocation


def expand(spec: NodeSpec) -> list[NodeSpec]:
    """`spec` and what runs beside it, with every address given to exactly one of them.

    A MultiProcessingColocation is replaced by its inner nodes. One inside a MultiThreadingColocation stays there, as
    the thread that waits for them.

    Raises:
        ValueError: a MultiProcessingColocation has no inner nodes.
    """
    parts = list(_parts(spec))
    owners = {address.id: parts[0].node_id for address in spec.node.addresses}
    for part in parts:  # an inner node comes after that around it, whose addresses include its own
        owners.update({address.id: part.node_id for address in part.node.addresses})
    return [
        dataclasses.replace(part, addresses=tuple(id for id, owner in owners.items() if owner == part.node_id))
        for part in parts
    ]


def _parts(spec: NodeSpec) -> Iterator[NodeSpec]:
    node = spec.node
    if isinstance(node, MultiProcessingColocation):
        yield from _inner_nodes(spec, node)
        return
    yield spec
    if isinstance(node, Colocation):
        yield from _beside(spec, node)


def _inner_nodes(spec: NodeSpec, colocation: MultiProcessingColocation) -> Iterator[NodeSpec]:
    colocation.check()
    colocation.inner_id = spec.node_id
    for place, child in enumerate(colocation.children):
        inner = dataclasses.replace(
            spec,
            node_id=f"{spec.node_id}.{place}",
            node=child,
            path=f"{spec.path}{colocation.path_to(place)}: ",
            # What it fails once more for, its colocation would be retried for.
            retries=(spec.retries + 1) * (colocation.num_retries_on_failure + 1) - 1,
        )
        yield from _parts(inner)


def _beside(spec: NodeSpec, threads: Colocation) -> Iterator[NodeSpec]:
    """The processes of colocations among the threads of a colocation, at any depth."""
    for place, child in enumerate(threads.children):
        inner = dataclasses.replace(
            spec, node_id=f"{spec.node_id}.{place}", node=child, path=f"{spec.path}{threads.path_to(place)}: "
        )
        if isinstance(child, MultiProcessingColocation):
            yield from _inner_nodes(inner, child)
        elif isinstance(child, Colocation):
            yield from _beside(inner, child)
