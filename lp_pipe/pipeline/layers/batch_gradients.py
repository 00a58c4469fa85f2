"""Gradients and outputs of a whole batch, for `step(outputs=True, input_grad=True)`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.batch_dims import Cut, Whole, is_leaf
from lp_pipe.pipeline.layers.message import Message, tensors_of
from lp_pipe.private_torch import pytree

_WITHOUT_GRAPH = (
    "stages run in other threads or processes, where autograd does not follow. To train what made the input, take the "
    "gradient back: result = pipeline.step((input, target), input_grad=True), then input.backward(result.input_grad). "
    "Otherwise give input.detach()"
)


def without_graph(value: Any, target: Any, *, input_grad: bool) -> Any:
    """Return the batch's input detached.

    Raises:
        PipelineError: a tensor of the input requires a gradient that was not asked for, or one of the target requires
            any.
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


def with_gradient(value: Any) -> Message:
    """Return a micro-batch's input as a message with tensors that require gradients, if they can have one.

    The tensors are new objects and no views: autograd marks them as results, and several micro-batches may share one.
    """
    once = {id(tensor): tensor.data for tensor in tensors_of(value)}
    value = pytree.tree_map(lambda leaf: once.get(id(leaf), leaf), value)
    return Message(value, tuple(_is_differentiable(tensor) for tensor in tensors_of(value)))


def gradients_of(value: Any, gradients: Sequence[Tensor | None], scale: float | None) -> Any:
    """Return a micro-batch's input with each tensor replaced by its gradient.

    It is zeros if the loss does not depend on the tensor, and None if the tensor can have no gradient.

    gradients: those of the tensors that require one.
    scale: the factor of the loss that is still in the gradients.
    """
    wanted = [tensor for tensor in tensors_of(value) if _is_differentiable(tensor)]
    found = {
        id(tensor): torch.zeros_like(tensor) if gradient is None else gradient.detach() / (scale or 1.0)
        for tensor, gradient in zip(wanted, gradients or [None] * len(wanted), strict=True)
    }
    return pytree.tree_map(lambda leaf: found.get(id(leaf)), value)


def detached_copy(value: Any) -> Any:
    """Return a copy of a stage's output without its graph."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def joined_outputs(parts: Mapping[int, Any], dim: int) -> Any:
    """Return the outputs of micro-batches, by index, as one output of the batch: tensors are joined along `dim`.

    Raises:
        PipelineError: the micro-batches have outputs of different structures.
    """
    values = [pytree.tree_flatten(parts[index]) for index in sorted(parts)]
    specs = [spec for _, spec in values]
    if any(spec != specs[0] for spec in specs):
        raise PipelineError("outputs=True needs outputs of the same structure from all micro-batches of the step")
    leaves = zip(*(leaves for leaves, _ in values), strict=True)
    return pytree.tree_unflatten([_joined(slices, dim) for slices in leaves], specs[0])


def joined_gradients(parts: Mapping[int, Any], value: Any) -> Any:
    """Return the micro-batches' gradients as one of the whole input, in the order of their indices.

    Gradients of a value that every micro-batch got whole are added up.

    value: the batch's input, with its marks.
    """
    marks, spec = pytree.tree_flatten(value, is_leaf=is_leaf)
    leaves = zip(*(pytree.tree_leaves(parts[index], is_leaf=_is_none) for index in sorted(parts)), strict=True)
    found = []
    for mark, slices in zip(marks, leaves, strict=True):
        if isinstance(mark, Whole):
            found.append(None if slices[0] is None else sum(slices[1:], slices[0]))
        else:
            found.append(_joined(slices, mark.dim if isinstance(mark, Cut) else 0))
    return pytree.tree_unflatten(found, spec)


def _joined(slices: Sequence[Any], dim: int) -> Any:
    if isinstance(slices[0], Tensor):
        return torch.cat(list(slices), dim) if slices[0].dim() > dim else torch.stack(list(slices))
    return None if slices[0] is None else list(slices)


def _is_none(value: Any) -> bool:
    return value is None


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
