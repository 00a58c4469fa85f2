"""The dimension along which each tensor of a batch is cut into micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import pytree

Dims = Any  # an int, None for a value that stays whole, or a dict, tuple or list of these in the structure of the value


@dataclass(frozen=True, eq=False)
class Cut:
    """A tensor with its samples along `dim`, or a list of samples.

    is_own: the user has marked it, and not `Model.batch_dims`; then it may have several entries for each sample.
    """

    value: Any
    dim: int = 0
    is_own: bool = True


@dataclass(frozen=True, eq=False)
class Whole:
    """A value that every micro-batch gets as it is, such as a mask that is the same for all samples."""

    value: Any


def cut(value: Any, dim: int = 0) -> Cut:
    """Mark a leaf of a batch: its samples lie along `dim`, or it is a list with an entry for each sample.

    It may have several entries for each sample (20 beside 10 samples: two each).
    """
    return Cut(value, dim)


def whole(value: Any) -> Whole:
    """Mark a leaf of a batch that every micro-batch gets as it is."""
    return Whole(value)


def is_leaf(value: Any) -> bool:
    """Return whether a value in a batch is one that `cut` or `whole` has marked."""
    return isinstance(value, Cut | Whole)


def marked(value: Any, dims: Dims) -> Any:
    """Return a batch's input or target with the marks that `Model.batch_dims` says; the user's own marks stay.

    Raises:
        PipelineError: `dims` has another structure than the value.
    """
    if is_leaf(value) or (isinstance(dims, int) and dims == 0):
        return value
    if dims is None:
        return Whole(value)
    if isinstance(dims, int):
        return pytree.tree_map(lambda leaf: _cut_along(leaf, dims), value, is_leaf=is_leaf)
    if isinstance(dims, Mapping) and isinstance(value, Mapping) and dims.keys() == value.keys():
        return type(value)({name: marked(part, dims[name]) for name, part in value.items()})  # type: ignore[call-arg]
    if isinstance(dims, Sequence) and isinstance(value, tuple | list) and len(dims) == len(value):
        parts = [marked(part, dim) for part, dim in zip(value, dims, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    raise PipelineError(
        f"batch_dims={dims!r} does not fit a {_described(value)}: give an int, None, or the value's own structure"
    )


def unmarked(value: Any) -> Any:
    """Return the value without marks."""
    if type(value) is Tensor:  # the usual case; pytree is slow
        return value
    return pytree.tree_map(lambda leaf: leaf.value if is_leaf(leaf) else leaf, value, is_leaf=is_leaf)


def length_of(leaf: Any) -> int | None:
    """Return how many entries along the batch's dimension a leaf has; None if it is not cut."""
    if isinstance(leaf, Cut):
        return len(leaf.value) if isinstance(leaf.value, list | tuple) else int(leaf.value.shape[leaf.dim])
    return len(leaf) if isinstance(leaf, Tensor) and leaf.dim() > 0 else None


def pieces_of(leaf: Any, microbatches: int) -> list[Any]:
    """Return at most `microbatches` slices of a leaf, as torch.chunk makes them; each has the leaf's mark.

    The slices of a tensor share its memory, but not its version: a layer that writes to one has not changed the others,
    which autograd may have saved.
    """
    if not isinstance(leaf, Cut):
        return [part.data for part in leaf.chunk(microbatches)]
    if isinstance(leaf.value, Tensor):
        return [Cut(part.data, leaf.dim, leaf.is_own) for part in leaf.value.chunk(microbatches, leaf.dim)]
    size = -(-len(leaf.value) // microbatches) or 1
    return [Cut(leaf.value[first : first + size]) for first in range(0, len(leaf.value), size)]


def check_dims(batch_dims: Any) -> tuple[Dims, Dims, int]:
    """Return the dimensions of input, target and output that `Model.batch_dims` means.

    Raises:
        PipelineError: it is neither an int nor (input, target) or (input, target, output).
    """
    if batch_dims is None:
        return 0, 0, 0
    if isinstance(batch_dims, int) and not isinstance(batch_dims, bool):
        return batch_dims, batch_dims, batch_dims
    if isinstance(batch_dims, tuple | list) and len(batch_dims) in (2, 3):
        first, second, *third = batch_dims
        output = third[0] if third else first if isinstance(first, int) else 0
        if isinstance(output, int):
            return first, second, output
    raise PipelineError(
        f"batch_dims must be an int, (input, target) or (input, target, output), got {batch_dims!r}: each is an int, "
        "None for a value that all micro-batches get whole, or a dict, tuple or list of these"
    )


def _cut_along(leaf: Any, dim: int) -> Any:
    return Cut(leaf, dim, is_own=False) if isinstance(leaf, Tensor) and leaf.dim() > dim else leaf


def _described(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, Mapping | Sequence) else type(value).__name__


# Registered as nodes, so that code that looks for a batch's tensors finds those inside; code that cuts a batch stops at
# the marks (is_leaf).
pytree.register_pytree_node(
    Cut, lambda cut: ([cut.value], (cut.dim, cut.is_own)), lambda values, context: Cut(*values, *context)
)
pytree.register_pytree_node(Whole, lambda whole: ([whole.value], None), lambda values, _: Whole(*values))
