"""Gradients and outputs of a whole batch: what `step(outputs=True, input_grad=True)` gives back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.message import tensors_of

_WITHOUT_GRAPH = (
    "stages run in other threads or processes, where autograd does not follow. To train what made the input, take the "
    "gradient back: result = pipeline.step((input, target), input_grad=True), then input.backward(result.input_grad). "
    "Otherwise give input.detach()"
)


def without_graph(value: Any, target: Any, *, input_grad: bool) -> Any:
    """Return the batch's input detached.

    Raises:
        PipelineError: a tensor of the input wants a gradient that nothing asks for, or one of the target wants any.
    """
    if any(leaf.requires_grad for leaf in tensors_of(target)):
        raise PipelineError(
            "a tensor of the batch's target requires a gradient, which a step does not compute: give target.detach()"
        )
    if not any(leaf.requires_grad for leaf in tensors_of(value)):
        return value
    if not input_grad:
        raise PipelineError(f"a tensor of the batch's input requires a gradient, which would be lost: {_WITHOUT_GRAPH}")
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def wants_gradient(value: Any) -> tuple[bool, ...]:
    """Return for each tensor of a micro-batch's input, in the order of `tensors_of`, whether it can have a gradient."""
    return tuple(_is_differentiable(tensor) for tensor in tensors_of(value))


def gradients_of(value: Any, gradients: Sequence[Tensor | None], scale: float | None) -> Any:
    """Return a micro-batch's input with each tensor replaced by its gradient.

    Zeros take the place of what the loss does not depend on, None of what can have no gradient.
    gradients: of the tensors that want one. scale: the factor of the loss that they still have.
    """
    wanted = [tensor for tensor in tensors_of(value) if _is_differentiable(tensor)]
    found = {
        id(tensor): torch.zeros_like(tensor) if gradient is None else gradient.detach() / (scale or 1.0)
        for tensor, gradient in zip(wanted, gradients or [None] * len(wanted), strict=True)
    }
    return pytree.tree_map(lambda leaf: found.get(id(leaf)), value)


def detached_copy(value: Any) -> Any:
    """Return a stage's output as values of its own."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def whole(parts: Mapping[int, Any]) -> Any:
    """Return the micro-batches' values, by index, as one of the whole batch: tensors one behind the other."""
    values = [parts[index] for index in sorted(parts)]
    if not values:
        return None
    flat, specs = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise PipelineError("outputs=True needs an output of one structure for all micro-batches of the step")
    return pytree.tree_unflatten([_joined(leaves) for leaves in zip(*flat, strict=True)], specs[0])


def _joined(leaves: Sequence[Any]) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.cat(list(leaves)) if leaves[0].dim() else torch.stack(list(leaves))
    return None if leaves[0] is None else list(leaves)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
