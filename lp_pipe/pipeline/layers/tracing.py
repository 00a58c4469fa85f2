"""The graph that torch.export makes of a module's forward, cut where the module marks it."""

import inspect
import linecache
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, fx, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.export_branches import _TORCH, AskedDtypes, branches_of, check_as_asked
from lp_pipe.pipeline.layers.export_gradients import own_gradients_refused
from lp_pipe.pipeline.layers.piece import Inputs, inputs_of, template_of
from lp_pipe.pipeline.layers.repeatability import unrepeatable_refused
from lp_pipe.private_torch import (
    is_pipe_split,
    pytree,
)


class Traced(NamedTuple):
    """The graph that torch.export found in one mode; `cuts` has the nodes of every piece, without inputs and state."""

    root: nn.Module
    inputs: Inputs
    outputs: Any  # a template, as that of PieceGraph
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
    """Trace the module as it is now, in the given mode.

    points: the submodules that are marked, for errors.
    fixed_sizes: fix all sizes but the number of samples.
    where_possible: leave out marks that forward does not reach, and those that would make an empty piece.

    Raises:
        PipelineError: torch.export cannot take the module, or the marks do not cut it into that many pieces.
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


_TALKATIVE = (
    "torch._export.non_strict_utils",
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_Example = tuple[tuple[Any, ...], dict[str, Any]]  # (positional arguments, keyword arguments)


def exported_in(
    mode: str, module: nn.Module, example: _Example, *, fixed_sizes: bool
) -> tuple[torch.export.ExportedProgram, fx.GraphModule]:
    """Return the exported program, and its graph as a module.

    The number of samples is free, or that is an error; other sizes are free if they can be.

    mode: the one that the module is in, for errors.
    fixed_sizes: fix all sizes but the number of samples.

    Raises:
        PipelineError: torch.export cannot take the module, or its graph would compute something else.
    """
    try:
        with _quiet(), _by_known_names(module, example) as example:
            try:
                exported = _exported_with(
                    torch.export.Dim.STATIC if fixed_sizes else torch.export.Dim.AUTO, module, example
                )
            except NotImplementedError:
                # AlexNet's pooling to 6 x 6: torch asks sympy for which sizes its graph holds, and sympy gives up.
                exported = _exported_with(torch.export.Dim.STATIC, module, example)
            # The program's guards allow exactly the example's kind of call; `Inputs` checks what matters here.
            return exported, exported.module(check_guards=False)
    except PipelineError:
        raise
    except Exception as error:  # also errors of the module's own forward
        raise not_exported(module, mode, error) from error


def _exported_with(other_sizes: Any, module: nn.Module, example: _Example) -> torch.export.ExportedProgram:
    sizes = torch.export.ShapesCollection()
    for tensor in pytree.tree_leaves(example):
        if isinstance(tensor, Tensor) and tensor.dim():
            sizes[tensor] = dict(enumerate([torch.export.Dim.DYNAMIC, *[other_sizes] * (tensor.dim() - 1)]))
    dynamic = sizes.dynamic_shapes(module, *example)
    # In a caller's torch.no_grad(), the graph would not have the module's own ones.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        own_gradients_refused(module),
        unrepeatable_refused(module),
        AskedDtypes(),
    ):
        return torch.export.export(module, *example, dynamic_shapes=dynamic)


@contextmanager
def _by_known_names(module: nn.Module, example: _Example) -> Iterator[_Example]:
    """Yield the arguments to call the module with in the body, so that torch.export knows the name of every one.

    torch.export refuses keywords that forward takes by **kwargs, as that of a wrapper does (PeftModel), or options
    (Llama's num_items_in_batch). Then forward takes two containers in the body, with the same leaves in the same order.
    """
    args, kwargs = example
    known = inspect.signature(module.forward).parameters
    if all(name in known and known[name].kind not in _VARIABLE for name in kwargs):
        yield example
        return
    forward, own = module.forward, module.__dict__.get("forward")

    def of_containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)

    module.forward = of_containers
    try:
        yield (args, kwargs), {}
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch prints about problems that it then solves in another way, or raises."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(_WithoutGraphs(sys.stderr)):
            warnings.filterwarnings("ignore", module=r"torch\.")
            warnings.filterwarnings("ignore", message="The tensor attribute")  # `is_same_again` tells what matters
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _WithoutGraphs:
    """A stream without the whole graph that torch.export prints before it raises."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__") == "torch.export._trace":
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_OF_VALUES = (
    "A graph has no branches and no sizes that depend on values (.item(), .tolist(), nonzero(), a mask as an index): "
    "compute with tensors (torch.where), switch it off in the configuration, or write the layers by hand"
)
_OF_SAMPLES = (
    "Micro-batches have any number of samples. Usual reasons: a number of samples that is written in forward "
    "(x.view(4, -1)); an example with fewer than 2 samples in a tensor. Otherwise write the layers by hand"
)
# Texts of torch's errors, each with the advice for it. Other errors get torch's own text alone.
_ADVICE = {
    "UncapturedHigherOrderOpError": (
        "torch.cond and the like cannot be split: a torch.autograd.Function in a branch would lose its backward "
        "without an error. Write the layers by hand"
    ),
    "in output, which is not a known type": (
        "Let forward return only tensors and plain containers: without a cache, for a model of transformers "
        "(config.use_cache=False). Or register the class with torch.utils._pytree.register_pytree_node"
    ),
    "C.Generator'>": (  # torch 2.11; later ones put it into the graph
        "forward uses a Generator of its own, which stages cannot have: draw from torch's default generator"
    ),
    "data-dependent": _OF_VALUES,
    "Constraints violated": _OF_SAMPLES,
    "user-specified dim hint": _OF_SAMPLES,
}


def not_exported(module: nn.Module, mode: str, error: Exception) -> PipelineError:
    """Return the error for a failure of torch.export, or of forward in it, with the line of forward."""
    text = f"{type(error).__name__}: {str(error).strip()}"
    advice = next((advice for sign, advice in _ADVICE.items() if sign in text), "")
    if advice:  # the advice says more than torch's hundred lines
        lines = text.splitlines()
        text = " ".join(lines[: 2 if lines[0].endswith(":") else 1]).split(". ")[0]
    what = f"{text.rstrip('.: ')}{_line_of_forward(error)}" + (f". {advice}" if advice else "")
    return PipelineError(f"torch.export cannot take {type(module).__name__} in {mode} mode: {what}")


def _line_of_forward(error: Exception) -> str:
    """Return the innermost line of a module's method; torch names its own lines, or ours."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        # The first argument, which may have another name than self.
        owner, file = _first_argument(frame), frame.f_code.co_filename
        if isinstance(owner, nn.Module) and not Path(file).is_relative_to(_TORCH):
            source = linecache.getline(file, line).strip()
            found = f" (at {Path(file).name}:{line}{f', {source}' if source else ''})"
    return found


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None
