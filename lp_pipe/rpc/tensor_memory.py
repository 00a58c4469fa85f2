"""How a tensor lies in memory, which it must also do where it arrives: kernels sum in the order of the strides.

Works on tensors through their methods, so that it needs no torch.
"""

import math
from collections.abc import Sequence
from typing import Any

# A view that skips most of its memory (one column of a wide matrix) arrives dense rather than with all its gaps.
_MAX_GAP_FACTOR = 2

LINE_BYTES = 64  # of a cache; what torch allocates begins with one


def without_repeats(tensor: Any) -> Any:
    """One element of each expanded dimension: all that has to travel of it."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def overlaps(tensor: Any) -> bool:
    """Whether elements share memory (windows made by unfold): such a tensor cannot be written, so it turns dense."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def strides_to_keep(tensor: Any) -> tuple[int, ...] | None:
    """The strides with which a tensor without repeats is rebuilt; None: contiguous."""
    if tensor.numel() <= 1 or tuple(tensor.stride()) == _row_major(tensor.shape) or overlaps(tensor):
        return None
    reach = extent(tensor.shape, tensor.stride())
    return tuple(tensor.stride()) if reach <= _MAX_GAP_FACTOR * tensor.numel() else None


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory lie from the first to the last of such a tensor, which has some."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def offset_in_line(tensor: Any, *, of_storage: bool = False) -> int:
    """Where the first element lies in a cache line, in elements; 0 where no kernel sums.

    At addresses that are no multiple of 16 bytes, such as that of a slice of a data set with 5 features, matrix
    products have other last bits.

    of_storage: as if the storage began with a line, as torch's do; else by the address.
    """
    if tensor.numel() <= 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    start = tensor.storage_offset() if of_storage else tensor.data_ptr() // tensor.element_size()
    return int(start % (LINE_BYTES // tensor.element_size()))


def copy_with_layout(tensor: Any, stride: Sequence[int], offset: int) -> Any:
    """A copy with these strides, whose first element lies so many elements behind the beginning of its storage."""
    memory = tensor.new_empty(offset + extent(tensor.shape, stride))
    return tensor.new_empty(0).set_(memory.untyped_storage(), offset, tensor.shape, stride).copy_(tensor)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Also of dimensions of size 1, by whose strides convolutions tell channels_last (weights of 1 x 1)."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
