"""torch.export of a module, with the sizes of its inputs as free as they can be."""

import inspect
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

import torch
from torch import Tensor, fx, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.asked_dtypes import AskedDtypes
from lp_pipe.pipeline.layers.lost_in_export import not_exported, own_gradients_refused
from lp_pipe.pipeline.layers.once_in_export import once_refused
from lp_pipe.private_torch import pytree

_TALKATIVE = (
    "torch._export.non_strict_utils",
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_Example = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def exported_in(
    mode: str, module: nn.Module, example: _Example, *, fixed_sizes: bool
) -> tuple[torch.export.ExportedProgram, fx.GraphModule]:
    """The program, and its graph as a module.

    The number of samples must be free, which is an error where it is not; other sizes are where they can be.

    mode: the one that the module is in, for the error. fixed_sizes: of all but the number of samples.

    Raises:
        PipelineError: torch.export cannot take the module, or its graph would compute otherwise.
    """
    try:
        with _quiet(), _by_known_names(module, example) as example:
            try:
                exported = _exported_with(
                    torch.export.Dim.STATIC if fixed_sizes else torch.export.Dim.AUTO, module, example
                )
            except NotImplementedError:
                # AlexNet's pooling to 6 x 6: torch has sympy solve for which sizes its graph holds, and sympy gives up.
                exported = _exported_with(torch.export.Dim.STATIC, module, example)
            # Its guards are for exactly the example's kind of call; `Inputs` checks what matters here.
            return exported, exported.module(check_guards=False)
    except PipelineError:
        raise
    except Exception as error:  # whatever the module's own forward raises comes through, too
        raise not_exported(module, mode, error) from error


def _exported_with(other_sizes: Any, module: nn.Module, example: _Example) -> torch.export.ExportedProgram:
    sizes = torch.export.ShapesCollection()
    for tensor in pytree.tree_leaves(example):
        if isinstance(tensor, Tensor) and tensor.dim():
            sizes[tensor] = dict(enumerate([torch.export.Dim.DYNAMIC, *[other_sizes] * (tensor.dim() - 1)]))
    dynamic = sizes.dynamic_shapes(module, *example)
    # Where the caller is in a torch.no_grad(), the graph would not have those of the module.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        own_gradients_refused(module),
        once_refused(module),
        AskedDtypes(),
    ):
        return torch.export.export(module, *example, dynamic_shapes=dynamic)


@contextmanager
def _by_known_names(module: nn.Module, example: _Example) -> Iterator[_Example]:
    """Yield what to call the module with in the body, so that torch.export knows the name of every argument.

    It refuses keywords that forward takes by **kwargs, as that of a wrapper does (PeftModel), or options (Llama's
    num_items_in_batch). Then forward takes two containers in the body, with the same leaves in the same order.
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
    """Keep from the terminal what torch writes of what it then solves in another way, or raises."""
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
    """A stream without the graph that torch.export prints, whole, before it raises."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__") == "torch.export._trace":
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
