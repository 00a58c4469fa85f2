"""Cut a batch into micro-batches as the plain loop does: torch.chunk along the batch's dimension."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lp_pipe.channels.packing import copied
from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.batch_dims import Cut, is_leaf, length_of, pieces_of, unmarked
from lp_pipe.pipeline.layers.message import untracked_tensors
from lp_pipe.pipeline.layers.model import LossWeight
from lp_pipe.private_torch import pytree
from lp_pipe.rpc import tensor_memory as layout_of_memory


def check_pair(batch: Any, where: str) -> tuple[Any, Any]:
    """Return the batch if it is a pair (input, target), as a tuple or as a DataLoader's list.

    Raises:
        PipelineError: it is something else.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PipelineError(f"{where} takes a pair (input, target), not {_described(batch)}")
    return batch[0], batch[1]


def split(value: Any, microbatches: int) -> list[Any]:
    """Return at most `microbatches` slices (torch.chunk may give fewer) of a tensor, or of containers of tensors.

    Values that `pp.cut` and `pp.whole` have marked keep their marks.

    Raises:
        PipelineError: as `count`.
    """
    number = count(value, microbatches)
    leaves, spec = pytree.tree_flatten(aligned(value), is_leaf=is_leaf)
    sliced = [pieces_of(leaf, microbatches) if length_of(leaf) is not None else [leaf] * number for leaf in leaves]
    return [pytree.tree_unflatten([slices[index] for slices in sliced], spec) for index in range(number)]


def count(batch: Any, microbatches: int) -> int:
    """Return into how many micro-batches the tensors of a batch are cut.

    Raises:
        PipelineError: there is no tensor to cut, tensors would be cut at different samples, or torch cannot cut one.
    """
    leaves = pytree.tree_leaves(batch, is_leaf=is_leaf)
    for leaf in leaves:
        if not is_leaf(leaf):
            _refuse_unknown_container(leaf)
            _refuse_array(leaf)
            _refuse_sparse(leaf)
    _refuse_packed(batch)
    lengths = [(length, leaf) for leaf in leaves if (length := length_of(leaf)) is not None]
    if not lengths:
        raise PipelineError(
            f"input and target must each hold at least one tensor with a batch dimension, not {type(batch).__name__}: "
            "make tensors of numbers and images (torch.tensor, torch.stack); if the loss needs no target, give the "
            "input as the target"
        )
    length = next((length for length, leaf in lengths if not _is_own(leaf)), lengths[0][0])
    size, number = _cut(length, microbatches)
    for other, leaf in lengths:
        other_size, other_number = _cut(other, microbatches)
        # 20 entries for 10 samples are two each; but slices of 5, 5, 5, 5 do not belong to slices of 3, 3, 3, 1.
        fits = other_number == number and other_size * length == size * other if _is_own(leaf) else other == length
        if not fits:
            shapes = [tuple(value.shape) if isinstance(value, Tensor) else len(value) for value in map(_inside, leaves)]
            raise PipelineError(
                f"the tensors of a batch have {length} and {other} samples (shapes {shapes}); each is cut along its "
                "first dimension. Mark the others: pp.cut(x, dim=1) around a tensor, pp.whole(x) around what is the "
                "same for all samples, or pp.Model(batch_dims=…); pp.cut(x) also allows several entries for each "
                "sample. Pad samples of different lengths, and give the lengths"
            )
    return number


def _is_own(leaf: Any) -> bool:
    return isinstance(leaf, Cut) and leaf.is_own


def _inside(leaf: Any) -> Any:
    value = leaf.value if is_leaf(leaf) else leaf
    return value if isinstance(value, Tensor | list | tuple) else ()


def _refuse_packed(batch: Any) -> None:
    if any(isinstance(one, PackedSequence) for one in pytree.tree_leaves(batch, is_leaf=_is_packed)):
        raise PipelineError(
            "the batch holds a PackedSequence, whose rows alternate between samples: give padded tensors and the "
            "lengths (torch.nn.utils.rnn.pad_packed_sequence), and pack inside the layer"
        )


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _cut(length: int, microbatches: int) -> tuple[int, int]:
    """Return the length of the first slice that torch.chunk makes, and the number of slices."""
    size = -(-length // microbatches)
    return size, -(-length // size) if size else microbatches


def loss_weights(targets: list[Any], loss_weight: LossWeight, what: str = "the batch's micro-batches") -> list[float]:
    """Return the factor of every micro-batch's loss, see `Model.loss_weight`.

    what: names the targets in the error.

    Raises:
        PipelineError: the weights add up to nothing, or a target has no samples to be counted.
    """
    if loss_weight == "one":
        return [1.0] * len(targets)
    raw = _raw_weights(targets, loss_weight)
    total = sum(raw)
    if not total > 0:
        raise PipelineError(
            f"the loss weights of {what} add up to {total}: {raw}: give a batch that has samples, or tokens, as "
            "loss_weight counts them, or call skip_step() to continue without it"
        )
    return [weight / total for weight in raw]


def total_weight(targets: list[Any], loss_weight: LossWeight) -> float:
    """Return the weight of all the targets together by `Model.loss_weight`, such as the number of samples."""
    return float(len(targets)) if loss_weight == "one" else sum(_raw_weights(targets, loss_weight))


def _raw_weights(targets: list[Any], loss_weight: LossWeight) -> list[float]:
    weigh = _samples if isinstance(loss_weight, str) else loss_weight
    wanted = "loss_weight must give a number for a micro-batch's target"
    given = targets if weigh is _samples else map(unmarked, targets)
    return [number_of(weigh(target), wanted) for target in given]


def aligned(value: Any) -> Any:
    """Return the value with tensors that begin in a cache line where torch's would.

    A tensor that comes twice stays one.
    """
    return _with_tensors(_aligned, value)


def apart(values: Iterable[Any]) -> list[Any]:
    """Return the values with copies of tensors that share memory with an earlier one: a layer may have changed it."""
    used: set[int] = set()
    found: list[Any] = []
    for value in values:
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        storages = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        found.append(value if used.isdisjoint(storages) else _with_tensors(copied, value))
        used |= storages
    return found


def _with_tensors(make: Callable[[Tensor], Tensor], value: Any) -> Any:
    once = functools.cache(make)  # as keys, tensors equal only themselves
    return pytree.tree_map(lambda leaf: once(leaf) if isinstance(leaf, Tensor) else leaf, value)


def number_of(value: Any, wanted: str) -> float:
    """Return what a user's function has returned as a float. wanted: what it should return, for the error.

    Raises:
        PipelineError: it is no number.
    """
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise PipelineError(f"{wanted}, not {what}") from error


def _refuse_unknown_container(leaf: Any) -> None:
    """Refuse a container that pytree does not know, such as a dataclass: every micro-batch would get all of it."""
    if is_dataclass(leaf) or (isinstance(leaf, (Mapping, Sequence)) and not isinstance(leaf, (str, bytes))):
        for name, _ in untracked_tensors(leaf):
            raise PipelineError(
                f"the batch holds a {type(leaf).__name__}, whose tensor {name!r} would not be cut into micro-batches: "
                "give tuples, lists and plain dicts of tensors, as dict(batch), or register the class with torch "
                "(torch.utils._pytree.register_pytree_node)"
            )


def _refuse_array(leaf: Any) -> None:
    """Refuse arrays of numpy and pandas: every micro-batch would get all of them."""
    shape = getattr(leaf, "shape", None)
    if shape and hasattr(leaf, "__array__") and not isinstance(leaf, Tensor):
        raise PipelineError(
            f"the batch holds a {type(leaf).__name__} of shape {tuple(shape)}, which would not be cut into "
            "micro-batches: give tensors, as torch.from_numpy(array)"
        )


def _refuse_sparse(leaf: Any) -> None:
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
        kind = "nested" if leaf.is_nested else f"of layout {leaf.layout}"
        raise PipelineError(
            f"the batch holds a tensor that is {kind}, which torch cannot cut into micro-batches: give dense tensors "
            "(padded ones with their lengths, a graph's edges with a mask) and build this tensor from them in the "
            "first layer; if it is the same for all samples, make it a buffer of a layer"
        )


def _described(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{size}"


def _samples(target: Any) -> int:
    for leaf in pytree.tree_leaves(target, is_leaf=is_leaf):
        if (length := length_of(leaf)) is not None:
            return length
    raise PipelineError(
        f"loss_weight='samples' counts a target's samples, but {_described(target)} holds no tensor with a batch "
        "dimension: if the loss needs no target, give the input as the target, or use pp.Model(loss_weight='one')"
    )


def _aligned(tensor: Tensor) -> Tensor:
    # Memory of a message may begin at any address, where kernels may sum in another order. So a slice of a data set
    # gets the place in a cache line that it has in the plain loop.
    if tensor.untyped_storage().data_ptr() % layout_of_memory.LINE_BYTES == 0:
        return tensor
    dense, offset = tensor.clone(), layout_of_memory.offset_in_line(tensor, of_storage=True)
    return layout_of_memory.copy_with_layout(dense, dense.stride(), offset) if offset else dense
