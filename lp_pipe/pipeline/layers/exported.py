"""torch.export of a module, with the sizes of its inputs as free as they can be."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.asked_dtypes import AskedDtypes
from lp_pipe.pipeline.layers.lost_in_export import not_exported, own_gradients_refused
from lp_pipe.pipeline.layers.once_in_export import once_refused


def exported_in(
    mode: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.export.ExportedProgram, fx.GraphModule]:
    """The program, and its graph as a module.

    The number of samples must be free, which is an error where it is not; other sizes are where they can be.

    mode: the one that the module is in, for the error.

    Raises:
        PipelineError: torch.export cannot take the module, or its graph would compute otherwise.
    """
    try:
        try:
            exported = _exported_with(torch.export.Dim.AUTO, module, args, kwargs)
        except NotImplementedError:
            # AlexNet's pooling to 6 x 6: torch has sympy solve for which sizes its graph holds, and sympy gives up.
            exported = _exported_with(torch.export.Dim.STATIC, module, args, kwargs)
        # Its guards are for exactly the example's kind of call; `Inputs` checks what matters here.
        return exported, exported.module(check_guards=False)
    except PipelineError:
        raise
    except Exception as error:  # whatever the module's own forward raises comes through, too
        raise not_exported(module, mode, error) from error


def _exported_with(other_sizes: Any, module: nn.Module, args: Any, kwargs: Any) -> torch.export.ExportedProgram:
    sizes = torch.export.ShapesCollection()
    for tensor in pytree.tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and tensor.dim():
            sizes[tensor] = dict(enumerate([torch.export.Dim.DYNAMIC, *[other_sizes] * (tensor.dim() - 1)]))
    dynamic = sizes.dynamic_shapes(module, args, kwargs)
    with own_gradients_refused(module), once_refused(module), AskedDtypes():
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
