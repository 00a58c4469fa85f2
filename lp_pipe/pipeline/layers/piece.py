"""A piece of a module that was cut: the operations that torch.export found there, and the tensors they need.

torch itself unpickles a graph by tracing its code, and runs what depends on no input. The numbers of a `torch.rand(8)`
would then be the same in each call, and a `torch.zeros(8)` that forward adds to would keep its sum. So a graph travels
as data, `GraphData`.
"""

import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.export_branches import Branch
from lp_pipe.pipeline.layers.wrapper import Wrapper
from lp_pipe.private_torch import pytree, set_state_version, state_version_of

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
    """Return the graph; all its operations run when it is called."""
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


@dataclass(frozen=True)
class Inputs:
    """The inputs of a whole module, and what is fixed about every leaf.

    template: (args, kwargs) with a placeholder for every leaf (a TreeSpec itself is not meant to be pickled).
    leaves: for a tensor its dtype and its sizes: a number if the module fixes the size, and a name if it may change
        (equal names are equal sizes). None and (value,) for anything else, which the export has made a constant.
    branches: the questions that forward asked about these sizes; the graph is for the example's answers.
    """

    template: tuple[tuple[Any, ...], dict[str, Any]]
    leaves: tuple[tuple[torch.dtype | None, tuple[Any, ...]], ...]
    branches: tuple[Branch, ...] = ()

    def flat(self, value: Any) -> list[Any]:
        """Return the leaves of a batch's input.

        It is a tensor, a tuple of positional arguments, or a dict of keyword arguments.

        Raises:
            PipelineError: the module was not split for such an input.
        """
        wanted = pytree.tree_structure(self.template)
        candidates: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((value,), {})]
        if isinstance(value, (tuple, list)):
            candidates.insert(0, (tuple(value), {}))
        if isinstance(value, dict):
            candidates.insert(0, ((), {name: value[name] for name in [*self.template[1], *value] if name in value}))
        for candidate in candidates:
            leaves, spec = pytree.tree_flatten(candidate)
            if spec == wanted:
                self._check(leaves)
                return leaves
        args, kwargs = self.template
        raise PipelineError(
            f"the module was split for inputs such as {args or kwargs}, but this batch's are {_short(value)}: give "
            "them as in example_inputs"
        )

    def _check(self, leaves: list[Any]) -> None:
        seen: dict[str, int] = {}
        for leaf, (dtype, wanted) in zip(leaves, self.leaves, strict=True):
            if dtype is None:
                if isinstance(leaf, Tensor) or leaf != wanted[0]:
                    raise PipelineError(f"the module was split for the constant {wanted[0]!r}, not {_short(leaf)}")
                continue
            sizes = tuple(leaf.shape) if isinstance(leaf, Tensor) else None
            if sizes is None or len(sizes) != len(wanted):
                raise PipelineError(f"the module was split for a tensor of {len(wanted)} dimensions: {_short(leaf)}")
            if leaf.dtype != dtype:
                raise PipelineError(
                    f"the module was split for a tensor of {dtype}, not of {leaf.dtype}, for which forward may "
                    "compute something else: convert the batch, or split with an example of that dtype"
                )
            for size, fixed in zip(sizes, wanted, strict=True):
                if size != (seen.setdefault(fixed, size) if isinstance(fixed, str) else fixed):
                    raise PipelineError(
                        f"the module was split for inputs of shape {list(wanted)}, not {list(sizes)}: torch.export "
                        "found that the numbers are fixed (split with another example, or without fixed_sizes) and "
                        "that equal names are equal sizes"
                    )
        for branch in self.branches:
            if not branch.holds(seen):
                found = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
                raise PipelineError(
                    f"{branch.where} branches on the inputs' sizes, and the module was split for the branch where "
                    f"{branch.condition}, which is false for {found} (the module takes {self._named()}): use sizes of "
                    "that branch, or write the layers by hand"
                )

    def _named(self) -> list[list[Any]]:
        return [list(wanted) for dtype, wanted in self.leaves if dtype is not None]


class Definitions(tuple[str, ...]):
    """Modules that define operations of a graph (torch.library); unpickling imports them."""

    def __reduce__(self) -> Any:
        if "__main__" in self:
            raise PipelineError(
                "the split module calls an operation (torch.library) that the script itself defines, and other "
                "processes do not run the script: define it in a module that the script imports"
            )
        return _imported, (tuple(self),)

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # all modules are imported within this process


def _imported(names: tuple[str, ...]) -> Definitions:
    for name in names:
        importlib.import_module(name)
    return Definitions(names)


class PieceGraph(NamedTuple):
    """A piece in one mode: `graph(*state, *constants, *values)` returns the values that later pieces need.

    definitions: the first field, so that it is unpickled before the graph.
    state: names of parameters and buffers.
    inputs: on the first piece.
    outputs: on the last one, a template as that of `Inputs`.
    """

    definitions: Definitions
    graph: fx.GraphModule
    state: tuple[str, ...]
    constants: tuple[Tensor, ...]
    values: int
    inputs: Inputs | None = None
    outputs: Any = None

    def __reduce__(self) -> Any:
        return _part_of, (self.definitions, data_of(self.graph), *self[2:])

    def __deepcopy__(self, memo: Any) -> "PieceGraph":
        return PieceGraph._make(copy.deepcopy(tuple(self), memo))


def _part_of(definitions: Definitions, graph: GraphData, *others: Any) -> PieceGraph:
    return PieceGraph(definitions, graph_of(graph), *others)


class Piece(Wrapper):
    """A layer made by `split`: takes a tuple with every value that it or a later piece needs, and returns the next one.

    It wraps a bare tree of modules with the parameters and buffers, under their names in the whole module.

    order: all names of the whole module's state_dict.
    origin: the same for the pieces of one module.
    """

    def __init__(
        self, tensors: nn.Module, parts: Mapping[bool, PieceGraph], order: tuple[str, ...], origin: str
    ) -> None:
        super().__init__(tensors)
        # by `training`; a dict, which nn.Module does not see: the parts have no names of their own
        self.parts = dict(parts)
        self.order = order
        self.origin = origin

    def around(self, layer: Any) -> Self:
        return type(self)(layer, self.parts, self.order, self.origin)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the tensors (`Module.to`), and let the operations make theirs on the same device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for training, part in self.parts.items():
            before = next(_devices_in(part), None)
            device = fn(torch.empty(0, dtype=torch.uint8, device=before)).device if before is not None else None
            if device is not None and device != before:
                self.parts[training] = _moved(part, device)
        return self

    def forward(self, value: Any) -> Any:
        part = self.parts[self.training]
        values = part.inputs.flat(value) if part.inputs is not None else value
        if not isinstance(values, (tuple, list)) or len(values) != part.values:
            raise PipelineError(
                f"this piece of a split module takes {part.values} values from the piece before it, not "
                f"{_short(value)}: keep the pieces in order, next to each other, and all in one mode"
            )
        made = part.graph(*(tensor_at(self.layer, name) for name in part.state), *part.constants, *values)
        return made if part.outputs is None else pytree.tree_unflatten(made, pytree.tree_structure(part.outputs))


def _devices_in(part: PieceGraph) -> Iterator[torch.device]:
    """Yield the example's devices, which torch.export has written into constants and operations (arange, zeros)."""
    yield from (constant.device for constant in part.constants)
    for node in (node for graph in _graphs_in(part) for node in graph.graph.nodes):
        leaves: list[Any] = []
        map_aggregate((node.args, node.kwargs), leaves.append)
        yield from (leaf for leaf in leaves if isinstance(leaf, torch.device))


def _moved(part: PieceGraph, device: torch.device) -> PieceGraph:
    """Return the piece with its operations on a device.

    Source: torch.export.passes.move_to_device_pass, which takes whole programs only.
    """
    part = part._replace(graph=copy.deepcopy(part.graph), constants=tuple(c.to(device) for c in part.constants))
    for graph in _graphs_in(part):
        for node in graph.graph.nodes:
            moved = map_aggregate((node.args, node.kwargs), lambda x: device if isinstance(x, torch.device) else x)
            node.args, node.kwargs = moved
        graph.recompile()
    return part


def _graphs_in(part: PieceGraph) -> list[fx.GraphModule]:
    """Return the piece's own graph, and those of blocks such as torch.no_grad()'s."""
    return [module for module in part.graph.modules() if isinstance(module, fx.GraphModule)]


def tensor_at(root: nn.Module, name: str) -> Any:
    """Return the attribute with this dotted name below a module."""
    inner, _, attribute = name.rpartition(".")
    return getattr(root.get_submodule(inner), attribute)


def holder(tensors: Mapping[str, tuple[Tensor, bool]], whole: nn.Module) -> nn.Module:
    """Return a tree of bare modules with (tensor, persistent) under their names.

    The modules have the state versions of the whole's modules.
    """
    root = nn.Module()
    for name, (tensor, persistent) in tensors.items():
        *path, attribute = name.split(".")
        module = root
        for child in path:
            if not hasattr(module, child):
                module.add_module(child, nn.Module())
            module = module.get_submodule(child)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(attribute, tensor)
        else:
            module.register_buffer(attribute, tensor, persistent=persistent)
    for name, module in root.named_modules():
        set_state_version(module, state_version_of(whole.get_submodule(name)))
    return root


def inputs_of(
    example: tuple[tuple[Any, ...], dict[str, Any]], placeholders: list[fx.Node], branches: tuple[Branch, ...]
) -> Inputs:
    """Return what an exported graph fixes about its inputs."""
    examples, spec = pytree.tree_flatten(example)
    leaves: list[tuple[torch.dtype | None, tuple[Any, ...]]] = []
    for node, example in zip(placeholders, examples, strict=True):
        if isinstance(example, Tensor):
            leaves.append((example.dtype, tuple(_fixed_or_named(size) for size in node.meta["val"].shape)))
        else:
            leaves.append((None, (example,)))
    return Inputs(template_of(spec), tuple(leaves), branches)


def _fixed_or_named(size: int | torch.SymInt) -> int | str:
    """Return a size as a number or a name.

    A size that forward has made a number, in a loop over it or by a float of it, may still be a symbol's value.
    """
    return int(str(size)) if str(size).isdecimal() else str(size)


def template_of(spec: pytree.TreeSpec) -> Any:
    """Return the containers of a pytree, with names for its leaves."""
    return pytree.tree_unflatten([f"leaf {index}" for index in range(spec.num_leaves)], spec)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list, dict)) else repr(value)[:80]
