"""Reader and writer of PipeDream's graph.txt (msr-fiddle/pipedream, graph/graph.py).

    node2 -- Conv2d(3, 64, …) -- forward_compute_time=3.7, backward_compute_time=4.1, activation_size=8.2e8, …
    <tab>node1 -- node2

Times are milliseconds; the size of several tensors is a list, [1.0; 2.0]; where a node has a stage, its line ends in
` -- stage_id=0`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lp_pipe.errors import PartitionError
from lp_pipe.pipeline.partitioning.fields import checked_number, read_text, write_text

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


class GraphNode(NamedTuple):
    """A node of the graph, which is a layer.

    sizes: bytes of the output and of the parameters.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    sizes: tuple[float, float]


def read(path: str | Path) -> tuple[list[GraphNode], list[tuple[str, str]]]:
    """Return the nodes, by number, and the edges, without those that PipeDream's optimizer drops.

    Raises:
        PartitionError: names the file and the line.
    """
    nodes: dict[str, GraphNode] = {}
    edges: list[tuple[str, str]] = []
    lines: list[int] = []  # of the edges
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        parts = line.strip().split(" -- ")
        if line.startswith("\t"):
            if len(parts) != 2:
                raise PartitionError(f"{where}: {line.strip()!r} is no edge: write <tab>node1 -- node2")
            edges.append((parts[0], parts[1]))
            lines.append(number)
        elif line.strip():
            node = _node(parts, where)
            if node.name in nodes:
                raise PartitionError(f"{where}: node {node.name!r} occurs twice: node names must differ")
            nodes[node.name] = node
    for number, edge in zip(lines, edges, strict=True):
        for name in edge:
            if name not in nodes:
                raise PartitionError(f"{path}, line {number}: edge {' -- '.join(edge)} names an unknown node {name!r}")
    kept = _without_inputs_and_unused(nodes, edges)
    return sorted(kept, key=_by_number), [edge for edge in edges if {*edge} <= {node.name for node in kept}]


def write(path: str | Path, nodes: Sequence[GraphNode], edges: Sequence[tuple[str, str]]) -> None:
    """Write such a file.

    Raises:
        PartitionError: a name cannot be told from what the format has around it, or the file cannot be written.
    """
    lines = []
    for node in nodes:
        if " -- " in node.name or node.name != node.name.strip() or len(node.name.splitlines()) > 1:
            raise PartitionError(f"{path}: the layer's name {node.name!r} cannot be written in this format: rename it")
        values = (node.forward_s * 1000, node.backward_s * 1000, *node.sizes)
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(_FIELDS, map(float, values), strict=True))
        lines.append(f"{node.name} -- {node.description} -- {fields}")
    lines += [f"\t{source} -- {reader}" for source, reader in edges]
    write_text(path, "\n".join(lines) + "\n")


def _node(parts: Sequence[str], where: str) -> GraphNode:
    if not 3 <= len(parts) <= 4:
        raise PartitionError(
            f"{where}: a node is written name -- description -- fields, with fields {', '.join(_FIELDS)}"
        )
    found = dict(field.split("=", 1) for field in parts[2].split(", ") if "=" in field)
    values = []
    for field in _FIELDS:
        if field not in found:
            raise PartitionError(f"{where}: {field} is missing")
        values.append(_number(found[field], f"{where}: {field}"))
    forward_ms, backward_ms, activation_bytes, parameter_bytes = values
    return GraphNode(parts[0], parts[1], forward_ms / 1000, backward_ms / 1000, (activation_bytes, parameter_bytes))


def _number(text: str, where: str) -> float:
    terms = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") else [text]
    try:
        numbers = [float(term) for term in terms if term.strip()]
    except ValueError as error:
        raise PartitionError(f"{where}: must be a number, not {text!r}") from error
    return sum(checked_number(number, where) for number in numbers)


def _without_inputs_and_unused(nodes: dict[str, GraphNode], edges: Sequence[tuple[str, str]]) -> list[GraphNode]:
    """Drop the sources that load data, and then, once, unused `__getitem__` sinks, as the optimizer does."""
    read = {reader for _, reader in edges}
    kept = [node for node in nodes.values() if node.name in read or not node.description.startswith("Input")]
    names = {node.name for node in kept}
    used = {source for source, reader in edges if reader in names}
    return [node for node in kept if node.name in used or not node.description.startswith("__getitem__")]


def _by_number(node: GraphNode) -> tuple[int, str]:
    digits = re.search(r"\d+$", node.name)
    return (int(digits.group()) if digits else 0, node.name)
