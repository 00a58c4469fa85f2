"""Costs of a model's layers: seconds, bytes, and which layers read their output. Needs no torch."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

from lp_pipe.errors import PartitionError
from lp_pipe.pipeline.partitioning.fields import (
    check_keys,
    checked_count,
    checked_number,
    in_file,
    read_json,
    read_text,
    write_json,
    write_text,
)
from lp_pipe.telemetry.names import name_list

_TIMES = ("forward_s", "backward_s")
_SIZES = ("activation_bytes", "parameter_bytes")
_KEYS = ("name", *_TIMES, *_SIZES)
_MEASURED = ("forward_spread_s", "backward_spread_s", "peak_bytes", "stash_bytes", "flops", "backward_flops")


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer, for one micro-batch.

    forward_s, backward_s: medians. activation_bytes: of its output. What was not measured is None: backward_weight_s,
    the part of backward_s that is for its parameters' gradients; forward_spread_s and backward_spread_s, between the
    first and the third quarter of the rounds; peak_bytes, the most that its tensors take at a time in forward and
    backward, beside its input, its parameters and their gradients; stash_bytes, what its forward leaves for its
    backward, without its input, and with its output if that or the next layer keeps it; flops and backward_flops, the
    floating-point operations of its forward and its backward that torch.utils.flop_counter counts: matrix products,
    convolutions, attention.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    backward_weight_s: float | None = None
    forward_spread_s: float | None = None
    backward_spread_s: float | None = None
    peak_bytes: float | None = None
    stash_bytes: float | None = None
    flops: float | None = None
    backward_flops: float | None = None

    @property
    def kept_bytes(self) -> float:
        """Return the bytes that wait for its backward: where that was not measured, its output."""
        return self.activation_bytes if self.stash_bytes is None else self.stash_bytes

    @property
    def backward_input_s(self) -> float | None:
        """Return the part of backward_s that is for the layer's inputs, as far as that is known."""
        return None if self.backward_weight_s is None else self.backward_s - self.backward_weight_s


@dataclass(frozen=True)
class Profile:
    """The costs of all layers of a model.

    edges: (name, name of a layer that reads its output); without: a chain in this order.
    microbatches: of a step of the program that was profiled, where the profile is of a program.

    Raises:
        PartitionError: a time or size is missing, negative or no number; names repeat; edges name unknown layers or go
            in a circle.
    """

    layers: tuple[LayerProfile, ...]
    edges: tuple[tuple[str, str], ...] | None = None
    microbatches: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.edges is not None:
            object.__setattr__(self, "edges", tuple((str(source), str(reader)) for source, reader in self.edges))
        if self.microbatches is not None:
            checked_count(self.microbatches, "profile: microbatches")
        _check_layers(self.layers, "profile")
        _check_edges(self.edges or (), [layer.name for layer in self.layers], "profile")
        self.order()

    @property
    def links(self) -> list[tuple[int, int]]:
        """Return the edges by index, each once, also those of a chain."""
        if self.edges is None:
            return list(pairwise(range(len(self.layers))))
        index = {layer.name: place for place, layer in enumerate(self.layers)}
        return sorted({(index[source], index[reader]) for source, reader in self.edges})

    def order(self) -> list[int]:
        """Return the layers by index, each behind those that it reads, else in the order in which they are listed."""
        readers: list[list[int]] = [[] for _ in self.layers]
        waits = [0] * len(self.layers)
        for source, reader in self.links:
            readers[source].append(reader)
            waits[reader] += 1
        free = [layer for layer, count in enumerate(waits) if not count]
        heapify(free)
        order: list[int] = []
        while free:
            order.append(heappop(free))
            for reader in readers[order[-1]]:
                waits[reader] -= 1
                if not waits[reader]:
                    heappush(free, reader)
        if len(order) < len(self.layers):
            circle = [layer.name for layer, count in zip(self.layers, waits, strict=True) if count]
            raise PartitionError(
                f"profile: edges: {name_list(circle, 5)} wait for each other: the edges must not go in a circle"
            )
        return order

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        layers = [{key: value for key, value in vars(layer).items() if value is not None} for layer in self.layers]
        text: dict[str, Any] = {"layers": layers}
        if self.edges is not None:
            text["edges"] = [list(edge) for edge in self.edges]
        if self.microbatches is not None:
            text["microbatches"] = self.microbatches
        write_json(path, text)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` has written.

        Raises:
            PartitionError: it is not such a file; names the file and the field.
        """
        text = read_json(path)
        check_keys(text, required=("layers",), optional=("edges", "microbatches"), where=str(path))
        if not isinstance(text["layers"], list):
            raise PartitionError(f"{path}: layers: must be a list of layers, not {text['layers']!r}")
        layers = [_layer(layer, f"{path}: layers[{place}]") for place, layer in enumerate(text["layers"])]
        edges = None if text.get("edges") is None else _pairs(text["edges"], str(path))
        with in_file(path, "profile"):
            return cls(tuple(layers), edges, text.get("microbatches"))

    @classmethod
    def from_pipedream(cls, path: str | Path) -> Self:
        """Read a graph.txt of PipeDream's profiler, without its `Input*` sources and unused `__getitem__` sinks.

        Raises:
            PartitionError: it is not such a file; names the file and the line.
        """
        nodes, edges = _read_graph(path)
        layers = [LayerProfile(node.name, node.forward_s, node.backward_s, *node.sizes) for node in nodes]
        with in_file(path, "profile"):
            return cls(tuple(layers), tuple(edges))

    def to_pipedream(self, path: str | Path) -> None:
        """Write a graph.txt; of a backward pass it holds only the whole time."""
        nodes = [
            GraphNode(
                layer.name,
                f"Layer({layer.name})",  # what begins with Input or __getitem__ may be dropped
                layer.forward_s,
                layer.backward_s,
                (layer.activation_bytes, layer.parameter_bytes),
            )
            for layer in self.layers
        ]
        names = [layer.name for layer in self.layers]
        _write_graph(path, nodes, [(names[source], names[reader]) for source, reader in self.links])


def _layer(text: Any, where: str) -> LayerProfile:
    if not isinstance(text, dict):
        raise PartitionError(f"{where}: must be an object with {', '.join(_KEYS)}, not {text!r}")
    check_keys(text, required=_KEYS, optional=("backward_weight_s", *_MEASURED), where=where)
    return LayerProfile(**text)


def _pairs(edges: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(edges, list) or not all(isinstance(edge, list) and len(edge) == 2 for edge in edges):
        raise PartitionError(f'{where}: edges: a list of ["layer", "layer that reads it"] is needed')
    return tuple((edge[0], edge[1]) for edge in edges)


def _check_layers(layers: Sequence[LayerProfile], where: str) -> None:
    if not layers:
        raise PartitionError(f"{where}: layers is empty: a model has at least one layer")
    seen: set[str] = set()
    for place, layer in enumerate(layers):
        at = f"{where}: layers[{place}]"
        if not isinstance(layer.name, str) or not layer.name:
            raise PartitionError(f"{at}.name: must be a text, not {layer.name!r}")
        if layer.name in seen:
            raise PartitionError(f"{at}.name: {layer.name!r} is taken by an earlier layer: names must differ")
        seen.add(layer.name)
        for key in (*_TIMES, *_SIZES):
            checked_number(getattr(layer, key), f"{at}.{key} (layer {layer.name!r})")
        for key in _MEASURED:
            if getattr(layer, key) is not None:
                checked_number(getattr(layer, key), f"{at}.{key} (layer {layer.name!r})")
        weight_s = layer.backward_weight_s
        if weight_s is not None and checked_number(weight_s, f"{at}.backward_weight_s") > layer.backward_s:
            raise PartitionError(f"{at}.backward_weight_s: {weight_s} is more than backward_s, of which it is a part")


def _check_edges(edges: Sequence[tuple[str, str]], names: Sequence[str], where: str) -> None:
    known = set(names)
    for place, edge in enumerate(edges):
        for name in edge:
            if name not in known:
                raise PartitionError(f"{where}: edges[{place}]: names an unknown layer {name!r}")


def total_seconds(profile: Profile) -> float:
    """Return the seconds of all layers forward and backward, one after another on one device."""
    return math.fsum(layer.forward_s + layer.backward_s for layer in profile.layers)


# Reader and writer of PipeDream's graph.txt (msr-fiddle/pipedream, graph/graph.py).
#
#     node2 -- Conv2d(3, 64, …) -- forward_compute_time=3.7, backward_compute_time=4.1, activation_size=8.2e8, …
#     <tab>node1 -- node2
#
# Times are milliseconds; the size of several tensors is a list, [1.0; 2.0]; where a node has a stage, its line ends in
# ` -- stage_id=0`.

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


def _read_graph(path: str | Path) -> tuple[list[GraphNode], list[tuple[str, str]]]:
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


def _write_graph(path: str | Path, nodes: Sequence[GraphNode], edges: Sequence[tuple[str, str]]) -> None:
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
