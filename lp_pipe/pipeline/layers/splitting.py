"""Split any nn.Module into layers: torch.export writes its forward down, and split points cut the graph."""

import difflib
import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipe_split

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.graph_memory import changed_state, refuse_shared_memory
from lp_pipe.pipeline.layers.piece import Definitions, Piece, PieceGraph, holder, tensor_at
from lp_pipe.pipeline.layers.repeatability import is_same_again, refusal
from lp_pipe.pipeline.layers.tracing import Traced, trace
from lp_pipe.private_torch import defining_module, pytree

_POINTS: dict[str | SplitPoint, SplitPoint] = {
    "beginning": SplitPoint.BEGINNING,
    "end": SplitPoint.END,
    **{point: point for point in SplitPoint},
}
SplitPoints = Literal["auto"] | Sequence[str] | Mapping[str, str] | Mapping[str, SplitPoint]


def split(
    module: nn.Module, example_inputs: Any, split_points: SplitPoints = (), *, fixed_sizes: bool = False
) -> list[nn.Module]:
    """Cut `module` into layers for a pp.Model; their parameters keep the names that they have in it.

    Values that a later piece needs travel through the pieces between, so the cut model may be any DAG. The pieces have
    the module's own parameters, which a pipeline copies. In train mode each submodule has the mode that it is in now;
    in evaluation all are in eval mode. Dropout draws under the `step_rng` of its piece.

    example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments, of at least two samples;
        batches are given likewise. They may have any number of samples, and other sizes where the module leaves them
        open.
    split_points: names of submodules before which to cut; or {name: "beginning" | "end"}, also as torch's SplitPoint.
        "auto": before each of the blocks that the module repeats in an nn.ModuleList or nn.Sequential. If empty, the
        module calls torch.distributed.pipelining.pipe_split() where it is to be cut.
    fixed_sizes: all other sizes are the example's in every batch. For a module that pads or makes windows (a Swin
        transformer) torch.export then takes seconds, and minutes if it has to leave them open.

    Raises:
        PipelineError: a name is unknown or never reached, a piece would be empty, the module has its own backward (a
            torch.autograd.Function, a hook), its forward depends on earlier calls, or torch.export cannot take it; then
            torch's error is the cause.
    """
    if not isinstance(module, nn.Module):
        raise PipelineError(f"split() takes an nn.Module, not {type(module).__name__}")
    is_auto = isinstance(split_points, str) and split_points == "auto"
    spec = _checked(module, _repeated(module) if is_auto else split_points)
    example_inputs = _each_once(example_inputs)
    example: tuple[tuple[Any, ...], dict[str, Any]] = ((), example_inputs)
    if not isinstance(example_inputs, dict):
        example = (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}
    is_same = is_same_again(module, example)  # before tracing, since the module may keep traced values
    with _marked(module, spec):
        points = list(spec)
        traced = {True: trace(module, example, points, "train", fixed_sizes, where_possible=is_auto)}
        with _all_in_eval_mode(module):
            traced[False] = trace(module, example, points, "eval", fixed_sizes, where_possible=is_auto)
    if len(traced[True].cuts) != len(traced[False].cuts):
        raise PipelineError(
            "the module has other pieces in eval mode than in train mode: let both modes reach the same split points"
        )
    pieces = _pieces(module, traced)
    if not is_same:  # reported last: other errors say more
        raise refusal(module)
    return pieces


def _repeated(module: nn.Module) -> list[str]:
    names = repeated_blocks(module)
    if not names:
        raise PipelineError(
            f"split_points='auto': {type(module).__name__} has no nn.ModuleList or nn.Sequential with two modules of "
            "one class: give the names of the submodules before which to cut"
        )
    return names


def _checked(module: nn.Module, split_points: SplitPoints) -> dict[str, SplitPoint]:
    if isinstance(split_points, str) or not isinstance(split_points, (Sequence, Mapping)):
        raise PipelineError(f"split_points={split_points!r}: give a list of names, or 'auto'")
    given = split_points if isinstance(split_points, Mapping) else dict.fromkeys(split_points, "beginning")
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    for name, where in given.items():
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise PipelineError(f"split point {name!r}: {type(module).__name__} has no submodule of this name{hint}")
        part = module.get_submodule(name)
        if type(part).forward is nn.Module.forward:
            held = next((child for child, _ in part.named_children()), None)
            hint = f": name what it holds, such as '{name}.{held}'" if held else ""
            raise PipelineError(f"split point {name!r} is a {type(part).__name__}, which has no forward to call{hint}")
        if where not in _POINTS:
            raise PipelineError(f"split point {name!r}: {where!r} must be 'beginning' or 'end'")
    return {name: _POINTS[where] for name, where in given.items()}


def _each_once(example_inputs: Any) -> Any:
    """Return the inputs with a copy of each tensor that comes again.

    torch.export would take one tensor, given as ids and as labels, for one input, but batches have two.
    """
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(own, example_inputs)


@contextmanager
def _marked(module: nn.Module, spec: dict[str, SplitPoint]) -> Iterator[None]:
    """Let the forwards of the named submodules call `pipe_split` in the body; then restore their own."""
    marked = [module.get_submodule(name) for name in spec]
    before = [submodule.__dict__.get("forward") for submodule in marked]
    try:
        for submodule, where in zip(marked, spec.values(), strict=True):
            submodule.forward = _marking(submodule.forward, where)
        yield
    finally:
        for submodule, forward in zip(marked, before, strict=True):
            submodule.__dict__.pop("forward", None)
            if forward is not None:
                submodule.forward = forward


def _marking(forward: Callable[..., Any], where: SplitPoint) -> Callable[..., Any]:
    """Return the forward with a mark before or behind it, as torch.distributed.pipelining sets them."""

    @functools.wraps(forward)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if where == SplitPoint.BEGINNING:
            pipe_split()
        result = forward(*args, **kwargs)
        if where == SplitPoint.END:
            pipe_split()
        return result

    return marked


@contextmanager
def _all_in_eval_mode(module: nn.Module) -> Iterator[None]:
    modes = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes.items():
            submodule.training = mode


def _pieces(module: nn.Module, traced: Mapping[bool, Traced]) -> list[nn.Module]:
    own = {
        name for names in (module.named_parameters, module.named_buffers) for name, _ in names(remove_duplicate=False)
    }
    parts = {mode: _parts(own, found) for mode, found in traced.items()}
    written = [changed_state(found.root, found.placeholders, found.cuts, own) for found in traced.values()]
    by_piece = list(zip(parts[True], parts[False], *written, strict=True))
    used = [{*train.state, *evaluation.state}.union(*changes) for train, evaluation, *changes in by_piece]
    changed: set[str] = set().union(*(names for names_by_piece in written for names in names_by_piece))
    order, origin = tuple(module.state_dict()), secrets.token_hex(8)
    return [
        Piece(holder(tensors, module), {mode: of_mode[index] for mode, of_mode in parts.items()}, order, origin)
        for index, tensors in enumerate(_shared_out(module, used, changed))
    ]


def _shared_out(module: nn.Module, used: Sequence[set[str]], changed: set[str]) -> list[dict[str, tuple[Tensor, bool]]]:
    """Return the parameters and buffers that each piece holds. Every name is in one of them, in the module's order.

    A parameter that two pieces use is one object in both, which makes them tied. A buffer that no piece writes to is
    copied instead: two stages may then have it.
    """
    tensors = {**dict(module.named_parameters(remove_duplicate=False))}
    buffers = dict(module.named_buffers(remove_duplicate=False))
    persistent = module.state_dict(keep_vars=True).keys()
    if not persistent <= tensors.keys() | buffers.keys():
        extra = sorted(persistent - tensors.keys() - buffers.keys())
        raise PipelineError(f"{extra[0]}: a module with get_extra_state() cannot be split")
    names_of: dict[int, list[str]] = {}
    for name, tensor in (tensors | buffers).items():
        names_of.setdefault(id(tensor), []).append(name)
    shares: list[dict[str, tuple[Tensor, bool]]] = [{} for _ in used]
    for name, tensor in (tensors | buffers).items():
        aliases = names_of[id(tensor)]
        users = [index for index, names in enumerate(used) if not names.isdisjoint(aliases)]
        homes = [index for index in users if name in used[index]] or users[:1] or [0]
        for home in homes:
            is_copy = name in buffers and home != homes[0] and changed.isdisjoint(aliases)
            shares[home][name] = (tensor.clone() if is_copy else tensor, name in persistent)
    return shares


def _parts(own: set[str], traced: Traced) -> list[PieceGraph]:
    """Return every piece's graph, with the values that are alive where it begins and where it ends.

    own: names of the module's parameters and buffers.
    """
    last = len(traced.cuts) - 1
    born = dict.fromkeys(traced.placeholders, -1)
    last_use: dict[fx.Node, int] = {}
    for index, nodes in enumerate([*traced.cuts, [traced.results]]):
        for node in nodes:
            born[node] = min(index, last)
            last_use.update(dict.fromkeys(node.all_input_nodes, min(index, last)))
    values = [node for node in born if node in last_use and node.op != "get_attr"]
    alive = [[node for node in values if born[node] < index <= last_use[node]] for index in range(last + 1)]
    refuse_shared_memory(traced.root, traced.placeholders, traced.cuts, alive)
    parts = []
    for index, nodes in enumerate(traced.cuts):
        taken = alive[index] if index else traced.placeholders
        results: Any = tuple(alive[index + 1]) if index < last else traced.results.args[0]
        part = _part(traced.root, own, nodes, taken, results)
        if index == 0:
            part = part._replace(inputs=traced.inputs)
        if index == last:
            part = part._replace(outputs=traced.outputs)
        parts.append(part)
    return parts


def _part(root: nn.Module, own: set[str], nodes: list[fx.Node], taken: list[fx.Node], results: Any) -> PieceGraph:
    graph = fx.Graph()
    needed: dict[fx.Node, None] = {}
    for node in nodes:
        needed |= dict.fromkeys(argument for argument in node.all_input_nodes if argument.op == "get_attr")
    fx.map_arg(results, lambda node: needed.setdefault(node) if node.op == "get_attr" else None)
    state = [node for node in needed if node.target in own]
    constants = [node for node in needed if node not in state and isinstance(tensor_at(root, str(node.target)), Tensor)]
    copies = {node: graph.placeholder(node.name) for node in [*state, *constants, *taken]}
    attributes = {}
    for node in needed:
        if node not in copies:  # the body of a torch.no_grad() block, or the like
            attributes[str(node.target)] = _bare(_block(tensor_at(root, str(node.target))))
            copies[node] = graph.get_attr(str(node.target))
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    graph.output(fx.map_arg(results, lambda node: copies[node]))
    return PieceGraph(
        definitions=_definitions(nodes),
        graph=_bare(fx.GraphModule(attributes, graph)),
        state=tuple(str(node.target) for node in state),
        constants=tuple(tensor_at(root, str(node.target)) for node in constants),
        values=len(taken),
    )


def _block(value: Any) -> fx.GraphModule:
    if isinstance(value, fx.GraphModule):
        return value
    hint = ": draw from torch's default generator" if isinstance(value, torch.Generator) else ""
    raise PipelineError(f"forward uses a {type(value).__name__} of its own, which stages cannot have{hint}")


def _definitions(nodes: list[fx.Node]) -> Definitions:
    return Definitions(sorted({name for node in nodes if (name := defining_module(node.target)) is not None}))


def _bare(graph: Any) -> Any:
    """Return the graph without torch.export's notes for compilers, which hold fake tensors and cannot be pickled."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            module.meta.clear()
            for node in module.graph.nodes:
                node.meta.clear()
    return graph


_LEAST_SHARE = 0.1  # of the parameters of all blocks; a class with less is a head or a stem
_ALIKE = 2  # the largest block of a class has at most this many times the parameters of the smallest
_FEW = 4


class _RepeatedBlock(NamedTuple):
    name: str
    module: nn.Module

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


def repeated_blocks(module: nn.Module) -> list[str]:
    """Return the names of all repeated blocks, in the order in which the module holds them.

    Blocks are two or more modules of one class in an nn.ModuleList or nn.Sequential. The outermost ones count: encoder
    and decoder may have some each. If blocks of a class are few or of different sizes (the stages of a Swin
    transformer), the blocks within them, of several modules each, replace them if they have most of the parameters.
    Classes that together have less than a tenth of all blocks' parameters are left out.
    """
    found = _refined(list(_outermost(module, "")))
    sizes = {block.name: block.size for block in found}
    by_class = _by_class(found)
    large = [blocks for blocks in by_class if sum(sizes[b.name] for b in blocks) > _LEAST_SHARE * sum(sizes.values())]
    names = {block.name for blocks in large for block in blocks}
    return [name for name, _ in module.named_modules() if name in names]


def _outermost(module: nn.Module, prefix: str) -> Iterator[_RepeatedBlock]:
    children = [_RepeatedBlock(f"{prefix}{name}", child) for name, child in module.named_children()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    classes = [type(child.module) for child in children]
    for child in children:
        has_forward = type(child.module).forward is not nn.Module.forward
        if is_list and has_forward and classes.count(type(child.module)) > 1:
            yield child
        else:
            yield from _outermost(child.module, f"{child.name}.")


def _refined(blocks: Sequence[_RepeatedBlock]) -> list[_RepeatedBlock]:
    """Return the same blocks, or the blocks within them if these divide the parameters more evenly."""
    refined: list[_RepeatedBlock] = []
    for alike in _by_class(blocks):
        sizes = [block.size for block in alike]
        inner = [block for outer in alike for block in _outermost(outer.module, f"{outer.name}.")]
        within = [block for block in inner if next(block.module.children(), None) is not None]  # not a single Linear
        is_uneven = len(alike) < _FEW or max(sizes) > _ALIKE * min(sizes)
        has_most = 2 * sum(block.size for block in within) > sum(sizes)
        refined += _refined(within) if is_uneven and has_most else alike
    return refined


def _by_class(blocks: Sequence[_RepeatedBlock]) -> list[list[_RepeatedBlock]]:
    classes: dict[type[nn.Module], list[_RepeatedBlock]] = {}
    for block in blocks:
        classes.setdefault(type(block.module), []).append(block)
    return list(classes.values())
