"""Entry points of a stage's graph: received values become results of a node that collects their gradients."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.pipeline.layers.message import Message, with_repeats
from lp_pipe.private_torch import pytree


def entered(phony: Tensor, gradients: list[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors as results of a graph that begins here; a backward puts their gradients into the list.

    A layer such as ReLU(inplace=True) may write to the results, as it may in one process.

    phony: a leaf that requires a gradient, so that autograd reaches this node (as torchgpipe's fork and join do it).
    """
    found: tuple[Tensor, ...] = _apply(phony, gradients, *tensors)  # type: ignore[no-untyped-call]
    return found


def enter(phony: Tensor, message: Message, gradients: list[Tensor | None]) -> Any:
    """Return the message's value; those of its tensors that require a gradient are `entered`.

    gradients: the list that receives theirs; it stays empty if none requires one.
    """
    if type(message.value) is Tensor:  # the usual case; pytree is slow
        if not any(message.wants_gradient):
            return message.value
        (result,) = _attached(phony, [message.value], gradients)
        return result[...] if any(message.is_view) else result
    leaves, spec = pytree.tree_flatten(message.value)
    if any(message.wants_gradient):
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        wanted = list(itertools.compress(places, message.wants_gradient))
        results = _attached(phony, [leaves[index] for index in wanted], gradients)
        for index, tensor in zip(wanted, results, strict=True):
            leaves[index] = tensor
        for index in itertools.compress(places, message.is_view):
            leaves[index] = leaves[index][...]  # autograd sees a view of the same memory
    return pytree.tree_unflatten(with_repeats(leaves), spec)


def phony() -> Tensor:
    """Return a leaf for `entered`."""
    with torch.inference_mode(False):
        return torch.empty(0, device="cpu", requires_grad=True)


def _attached(phony: Tensor, tensors: Sequence[Tensor], gradients: list[Tensor | None]) -> tuple[Tensor, ...]:
    gradients[:] = [None] * len(tensors)
    return entered(phony, gradients, tensors)


class _GraphEntry(torch.autograd.Function):
    """A node with a backward that stores the gradients in a list instead of passing them on.

    The tensors are marked as changed in place, which makes them results of this function rather than leaves.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, gradients: list[Tensor | None], *tensors: Tensor) -> tuple[Tensor, ...]:
        # Only the list: the stash's outputs lead back to here, so with the stash the graph would keep itself alive.
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients[:] = gradients
        return (None, None, *(None for _ in gradients))


# Function.apply first looks for functorch's transforms, which no stage uses; that takes as long as all the rest.
_apply = super(torch.autograd.Function, _GraphEntry).apply
