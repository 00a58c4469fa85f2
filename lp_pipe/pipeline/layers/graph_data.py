"""A graph of operations as data, to be pickled.

torch itself unpickles a graph by tracing its code, and runs what depends on no input. The numbers of a `torch.rand(8)`
would then be the same in each call, and a `torch.zeros(8)` that forward adds to would keep its sum.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

_OVERLOAD = type(torch.ops.aten.add.Tensor)


@dataclass(frozen=True)
class _Operation:
    """An operation of torch, by its names: aten, add, Tensor."""

    names: tuple[str, ...]

    def found(self) -> Any:
        found: Any = torch.ops
        for name in self.names:
            found = getattr(found, name)
        return found


@dataclass(frozen=True)
class _ResultOf:
    """The result of the operation at this position; stands in place of its node."""

    position: int


class _Line(NamedTuple):
    op: str
    target: Any
    args: Any
    kwargs: Any
    name: str


class GraphData(NamedTuple):
    """A graph: its operations, and the blocks of torch.no_grad() and the like, by their names."""

    lines: tuple[_Line, ...]
    attributes: dict[str, "GraphData"]


def data_of(module: fx.GraphModule) -> GraphData:
    """Return the data from which `graph_of` makes the same graph."""
    positions: dict[Any, Any] = {node: _ResultOf(position) for position, node in enumerate(module.graph.nodes)}

    def line(node: fx.Node) -> _Line:
        args, kwargs = (map_aggregate(given, lambda x: positions.get(x, x)) for given in (node.args, node.kwargs))
        return _Line(node.op, _named(node.target), args, kwargs, node.name)

    blocks = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    return GraphData(
        tuple(line(node) for node in module.graph.nodes),
        {name: data_of(module.get_submodule(name)) for name in sorted(blocks)},  # type: ignore[arg-type]
    )


def graph_of(data: GraphData) -> fx.GraphModule:
    """Return the graph, each of whose operations runs when it is called."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for line in data.lines:
        args, kwargs = (
            map_aggregate(given, lambda x: nodes[x.position] if isinstance(x, _ResultOf) else x)
            for given in (line.args, line.kwargs)
        )
        target = line.target.found() if isinstance(line.target, _Operation) else line.target
        nodes.append(graph.create_node(line.op, target, args, kwargs, line.name))
    return fx.GraphModule({name: graph_of(block) for name, block in data.attributes.items()}, graph)


def _named(target: Any) -> Any:
    if isinstance(target, _OVERLOAD):
        return _Operation(tuple(str(target).split(".")))
    is_of_blocks = getattr(target, "namespace", None) == "higher_order"
    return _Operation(("higher_order", target.name())) if is_of_blocks else target
