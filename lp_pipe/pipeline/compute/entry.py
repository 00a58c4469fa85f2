"""Where values enter a graph that begins with them, and what becomes of their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def entered(phony: Tensor, gradients: list[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors as results of a graph that begins here; a backward puts their gradients into the list.

    phony: a leaf that wants a gradient; it is what makes autograd come here (torchgpipe's fork and join use the same
    means). A layer such as ReLU(inplace=True) may write to the results, as it may in one process.
    """
    found: tuple[Tensor, ...] = _apply(phony, gradients, *tensors)  # type: ignore[no-untyped-call]
    return found


def phony() -> Tensor:
    """A leaf to enter by."""
    with torch.inference_mode(False):
        return torch.empty(0, requires_grad=True)


class _Entry(torch.autograd.Function):
    """Its backward hands the gradients to a list instead of further down.

    The tensors are marked as changed in place, which makes them results of this function rather than leaves.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, gradients: list[Tensor | None], *tensors: Tensor) -> tuple[Tensor, ...]:
        # Only the list: with the stash, whose outputs lead back to here, the graph would hold itself for ever.
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients[:] = gradients
        return (None, None, *(None for _ in gradients))


# Function.apply first looks for functorch's transforms, in which no stage runs; that takes as long as all the rest.
_apply = super(torch.autograd.Function, _Entry).apply
