"""Writes of the operations of an exported graph, and the values in it that share memory."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.piece import tensor_at
from lp_pipe.private_torch import schema_arguments

# batch_norm writes to these arguments, which its schema does not say
_CHANGED_BUFFERS = ("running_mean", "running_var")

_Memory = dict[fx.Node, fx.Node]  # maps each value to the first one that shares its memory


def changed_state(
    root: nn.Module, placeholders: list[fx.Node], cuts: Sequence[list[fx.Node]], own: set[str]
) -> list[set[str]]:
    """Return, for each piece, the names of the state that it writes to, such as a BatchNorm's statistics.

    Writes through views count, also through views that an earlier piece has made.

    own: names of the module's parameters and buffers.

    Raises:
        PipelineError: a piece writes to another tensor of the module's, of which each piece has its own copy.
    """
    memory = _memory(root, placeholders, [node for nodes in cuts for node in nodes])
    found = [{str(first.target) for first in _changed(root, nodes, memory) if first.op == "get_attr"} for nodes in cuts]
    for name in sorted(set().union(*found) - own):
        raise PipelineError(
            f"forward writes to {name!r}, a tensor of the module's that is no buffer, so evaluations, checkpoints and "
            "other pieces do not see it: make it one (self.register_buffer)"
        )
    return found


def refuse_shared_memory(
    root: nn.Module, placeholders: list[fx.Node], cuts: Sequence[list[fx.Node]], alive: Sequence[list[fx.Node]]
) -> None:
    """Refuse values that share memory on the way between pieces if a later piece writes to one of them.

    They arrive in memory of their own, so a write to one would not change the other.

    alive: for each piece, the values that come from pieces before it.

    Raises:
        PipelineError: a later piece writes to such a value.
    """
    memory = _memory(root, placeholders, [node for nodes in cuts for node in nodes])
    for index in range(1, len(alive)):
        changed = _changed(root, [node for nodes in cuts[index:] for node in nodes], memory)
        seen: dict[fx.Node, fx.Node] = {}
        for node in alive[index]:
            first = seen.setdefault(memory[node], node)
            if first is not node and memory[node] in changed:
                raise PipelineError(
                    f"between pieces {index - 1} and {index}, {first.name!r} and {node.name!r} share memory (one is a "
                    "view of the other) that a later piece writes to in place: cut elsewhere, or do not write in place"
                )


def _changed(root: nn.Module, nodes: Iterable[fx.Node], memory: _Memory) -> set[fx.Node]:
    """Return the first values of the memories that these operations write to."""
    return {memory.get(written, written) for node in nodes for written in _written(root, node)}


def _written(root: nn.Module, node: fx.Node) -> list[fx.Node]:
    """Return the values that an operation writes to in place, also in its blocks (torch.no_grad() and the like)."""
    found: list[fx.Node] = []
    for argument, given in _arguments(node):
        if argument.name in _CHANGED_BUFFERS or (argument.alias_info and argument.alias_info.is_write):
            fx.map_arg(given, found.append)
    for block, outer in _blocks(root, node):
        changed = _changed(block, block.graph.nodes, _memory_in(block))
        found += [given for inner, given in outer.items() if inner in changed]
    return found


def _arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """Return the arguments of an operation, as its schema describes them, each with its value."""
    arguments = schema_arguments(node.target)
    named = [(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs]
    return [*zip(arguments, node.args, strict=False), *named]


def _blocks(root: nn.Module, node: fx.Node) -> Iterator[tuple[fx.GraphModule, dict[fx.Node, fx.Node]]]:
    """Yield the blocks that an operation is given, each with the outer values of its inputs."""
    for place, given in enumerate(node.args):
        body = tensor_at(root, str(given.target)) if isinstance(given, fx.Node) and given.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            pairs = zip(body.graph.find_nodes(op="placeholder"), node.args[place + 1 :], strict=False)
            yield body, {inner: outer for inner, outer in pairs if isinstance(outer, fx.Node)}


def _memory(root: nn.Module, placeholders: list[fx.Node], nodes: Iterable[fx.Node]) -> _Memory:
    """Return the memory of each value, by the operations' schemas."""
    memory = {node: node for node in placeholders}
    results: dict[Any, Any] = {}  # for each block, the outer values of which its results are views
    for node in nodes:
        sources = [given for argument, given in _arguments(node) if argument.alias_info]
        if node.target is operator.getitem:
            whole, place = node.args
            sources = [results[whole][place] if whole in results else whole]
        for block, outer in _blocks(root, node):
            inside = _memory_in(block)
            made: Any = block.graph.output_node().args[0]
            results[node] = [outer.get(inside.get(value, value)) for value in made]
        source = next((given for given in sources if isinstance(given, fx.Node)), node)
        memory[node] = memory.get(source, source)
    return memory


def _memory_in(block: fx.GraphModule) -> _Memory:
    operations = [node for node in block.graph.nodes if node.op == "call_function"]
    return _memory(block, block.graph.find_nodes(op="placeholder"), operations)
