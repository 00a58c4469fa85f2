"""The layout of a tensor in memory, which must be the same where it arrives: kernels sum in the order of the strides.

The functions use the tensors' methods only, so that they need no torch.
"""

import math
from collections.abc import Sequence
from typing import Any

# A view that skips most of its memory (one column of a wide matrix) arrives dense and not with all its gaps.
_MAX_GAP_FACTOR = 2

LINE_BYTES = 64  # of a cache line; memory that torch allocates begins with a line


def without_repeats(tensor: Any) -> Any:
    """Return the tensor with one element of each expanded dimension, which is all that has to travel."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def overlaps(tensor: Any) -> bool:
    """Return whether elements share memory (windows of unfold): such a tensor is not writable, so it becomes dense."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def strides_to_keep(tensor: Any) -> tuple[int, ...] | None:
    """Return the strides with which a tensor without repeats is rebuilt; None: contiguous."""
    if tensor.numel() <= 1 or tuple(tensor.stride()) == _row_major(tensor.shape) or overlaps(tensor):
        return None
    reach = extent(tensor.shape, tensor.stride())
    return tuple(tensor.stride()) if reach <= _MAX_GAP_FACTOR * tensor.numel() else None


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of memory such a tensor spans, from its first to its last element."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def offset_in_line(tensor: Any, *, of_storage: bool = False) -> int:
    """Return the position of the first element in its cache line, in elements; 0 where no kernel sums.

    At addresses that are no multiple of 16 bytes, such as that of a slice of a data set with 5 features, matrix
    products have other last bits.

    of_storage: count as if the storage began with a line, as torch's do; otherwise count from the address.
    """
    if tensor.numel() <= 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    start = tensor.storage_offset() if of_storage else tensor.data_ptr() // tensor.element_size()
    return int(start % (LINE_BYTES // tensor.element_size()))


def copy_with_layout(tensor: Any, stride: Sequence[int], offset: int) -> Any:
    """Return a copy with these strides; its first element lies `offset` elements after the start of its storage."""
    memory = tensor.new_empty(offset + extent(tensor.shape, stride))
    return tensor.new_empty(0).set_(memory.untyped_storage(), offset, tensor.shape, stride).copy_(tensor)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides, also for dimensions of size 1, by which convolutions recognise channels_last."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
