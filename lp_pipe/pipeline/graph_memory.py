"""What the operations of an exported graph write to, and which of its values share memory."""

import operator
from collections.abc import Iterator, Sequence

from torch import fx

from lp_pipe.errors import PipelineError

_CHANGED_BUFFERS = ("running_mean", "running_var")  # arguments that batch_norm writes to; its schema does not say so


def changed_state(cuts: Sequence[list[fx.Node]]) -> Iterator[str]:
    """Names of the state that forward writes to, such as a BatchNorm's statistics."""
    for node in (node for nodes in cuts for node in nodes):
        yield from (str(written.target) for written in _written(node) if written.op == "get_attr")


def _written(node: fx.Node) -> list[fx.Node]:
    """What an operation writes to in place."""
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return [
        given
        for argument, given in zip(arguments, node.args, strict=False)
        if isinstance(given, fx.Node)
        and (argument.name in _CHANGED_BUFFERS or (argument.alias_info and argument.alias_info.is_write))
    ]


def refuse_shared_memory(
    placeholders: list[fx.Node], cuts: Sequence[list[fx.Node]], alive: Sequence[list[fx.Node]]
) -> None:
    """Two values that share memory arrive apart: a later piece that writes to one would not change the other.

    alive: for each piece, what comes from pieces before it.

    Raises:
        PipelineError: a later piece does so.
    """
    memory = _memory(placeholders, cuts)
    for index in range(1, len(alive)):
        later = [node for nodes in cuts[index:] for node in nodes]
        changed = {memory.get(written, written) for node in later for written in _written(node)}
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
        schema = getattr(node.target, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        sources = [given for argument, given in zip(arguments, node.args, strict=False) if argument.alias_info]
        if node.target is operator.getitem:
            sources = [node.args[0]]
        source = next((given for given in sources if isinstance(given, fx.Node)), node)
        memory[node] = memory.get(source, source)
    return memory
