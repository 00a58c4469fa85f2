"""What torch.export writes down of a module's forward, cut where the module marks it."""

from typing import Any, NamedTuple

from torch import fx, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.asked_dtypes import check_as_asked
from lp_pipe.pipeline.layers.exported import exported_in
from lp_pipe.pipeline.layers.lost_in_export import branches_of
from lp_pipe.pipeline.layers.piece import Inputs, inputs_of, template_of
from lp_pipe.private_torch import is_pipe_split


class Traced(NamedTuple):
    """What torch.export found in one mode; `cuts` has the nodes of every piece, without inputs and state."""

    root: nn.Module
    inputs: Inputs
    outputs: Any  # a template, as Part has it
    placeholders: list[fx.Node]
    cuts: list[list[fx.Node]]
    results: fx.Node


def trace(
    module: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    points: list[str],
    mode: str,
    fixed_sizes: bool,
    *,
    where_possible: bool = False,
) -> Traced:
    """The module as it is now, which is `mode` for whoever reads of it.

    points: the submodules that are marked, for messages. fixed_sizes: but for the first, the number of samples.
    where_possible: leave out marks that forward does not reach, and those that would make an empty piece.

    Raises:
        PipelineError: torch.export cannot take it, or the marks do not cut it into that many pieces.
    """
    exported, root = exported_in(mode, module, example, fixed_sizes=fixed_sizes)
    check_as_asked(root)
    placeholders, cuts, results = _cut(root.graph)
    if where_possible:
        cuts = [nodes for nodes in cuts if nodes]
    _check_cuts(module, points, cuts, where_possible=where_possible)
    out_spec = exported.call_spec.out_spec
    assert out_spec is not None, "an exported program knows what it returns"
    inputs = inputs_of(example, placeholders, branches_of(placeholders))
    return Traced(root, inputs, template_of(out_spec), placeholders, cuts, results)


def _cut(graph: fx.Graph) -> tuple[list[fx.Node], list[list[fx.Node]], fx.Node]:
    placeholders: list[fx.Node] = []
    pieces: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op == "placeholder":
            placeholders.append(node)
        elif is_pipe_split(node.target):
            pieces.append([])
        elif node.op == "call_function":
            pieces[-1].append(node)
    return placeholders, pieces, graph.output_node()


def _check_cuts(module: nn.Module, points: list[str], cuts: list[list[fx.Node]], *, where_possible: bool) -> None:
    if len(cuts) < 2:
        raise PipelineError(
            f"{type(module).__name__} has no split points: name submodules, or call pipe_split() in its forward"
            if not points
            else f"split points {points}: forward calls none of them outside of no_grad() and autocast()"
        )
    if len(cuts) <= len(points) and not where_possible:
        raise PipelineError(f"split points {points} make {len(cuts)} pieces only: forward does not call all of them")
    for index, nodes in enumerate(cuts):
        if not nodes:
            raise PipelineError(
                f"piece {index} of {len(cuts)} is empty: between two split points, or before the first or behind the "
                f"last one, {type(module).__name__} computes nothing: leave one out of {points or 'pipe_split()'}"
            )
