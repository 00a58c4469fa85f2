"""What the operations of an exported graph write to, and which of its values share memory."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.piece import tensor_at

_CHANGED_BUFFERS = ("running_mean", "running_var")  # arguments that batch_norm writes to; its schema does not say so


def changed_state(root: nn.Module, placeholders: list[fx.Node], cuts: Sequence[list[fx.Node]]) -> Iterator[str]:
    """Names of the state that forward writes to, such as a BatchNorm's statistics; through views of it, too."""
    memory = _memory(placeholders, cuts)
    for node in (node for nodes in cuts for node in nodes):
        changed = [memory.get(written, written) for written in _written(root, node)]
        yield from (str(first.target) for first in changed if first.op == "get_attr")


def _written(root: nn.Module, node: fx.Node) -> list[fx.Node]:
    """What an operation writes to in place; for the block of a torch.no_grad() or the like, what that does."""
    found: list[fx.Node] = []
    for argument, given in _arguments(node):
        if argument.name in _CHANGED_BUFFERS or (argument.alias_info and argument.alias_info.is_write):
            fx.map_arg(given, found.append)
    for place, given in enumerate(node.args):
        body = tensor_at(root, str(given.target)) if isinstance(given, fx.Node) and given.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            found += _written_in(body, node.args[place + 1 :])
    return found


def _written_in(body: fx.GraphModule, given: Sequence[Any]) -> list[fx.Node]:
    """Which of the values given to a block it writes to."""
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    nodes = [node for node in body.graph.nodes if node.op == "call_function"]
    memory = _memory(inputs, [nodes])
    changed = {memory.get(written, written) for node in nodes for written in _written(body, node)}
    return [
        outer for inner, outer in zip(inputs, given, strict=False) if inner in changed and isinstance(outer, fx.Node)
    ]


def _arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """The arguments of an operation, as its schema describes them, and what they are given."""
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    named = [(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs]
    return [*zip(arguments, node.args, strict=False), *named]


def refuse_shared_memory(
    root: nn.Module, placeholders: list[fx.Node], cuts: Sequence[list[fx.Node]], alive: Sequence[list[fx.Node]]
) -> None:
    """Two values that share memory arrive apart: a later piece that writes to one would not change the other.

    alive: for each piece, what comes from pieces before it.

    Raises:
        PipelineError: a later piece does so.
    """
    memory = _memory(placeholders, cuts)
    for index in range(1, len(alive)):
        later = [node for nodes in cuts[index:] for node in nodes]
        changed = {memory.get(written, written) for node in later for written in _written(root, node)}
        seen: dict[fx.Node, fx.Node] = {}
        for node in alive[index]:
            first = seen.setdefault(memory[node], node)
            if first is not node and memory[node] in changed:
                raise PipelineError(
                    f"between pieces {index - 1} and {index}, {first.name!r} and {node.name!r} share memory (one is a "
                    "view of the other) that a later piece writes to in place: cut elsewhere, or do not write in place"
                )


def _memory(placeholders: list[fx.Node], cuts: Sequence[list[fx.Node]]) -> dict[fx.Node, fx.Node]:
    """For every value the first one whose memory it shares, as the operations' schemas say."""
    memory = {node: node for node in placeholders}
    for node in (node for nodes in cuts for node in nodes):
        sources = [given for argument, given in _arguments(node) if argument.alias_info]
        if node.target is operator.getitem:
            sources = [node.args[0]]
        source = next((given for given in sources if isinstance(given, fx.Node)), node)
        memory[node] = memory.get(source, source)
    return memory
