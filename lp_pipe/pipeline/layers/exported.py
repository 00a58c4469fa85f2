"""torch.export of a module, with the sizes of its inputs as free as they can be."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.asked_dtypes import AskedDtypes
from lp_pipe.pipeline.layers.lost_in_export import not_exported, own_gradients_refused
from lp_pipe.pipeline.layers.once_in_export import once_refused
from lp_pipe.private_torch import pytree

_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
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
        _quiet(),
    ):
        return torch.export.export(module, *example, dynamic_shapes=dynamic)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the tracebacks that torch logs of what it then solves in another way, or raises."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
