"""How a tensor lies in memory, which it must also do where it arrives: kernels sum in the order of the strides.

Works on tensors through their methods, so that it needs no torch.
"""

import math
from collections.abc import Sequence
from typing import Any

# A view that skips most of its memory (one column of a wide matrix) arrives dense rather than with all its gaps.
_MAX_GAP_FACTOR = 2


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


def kept_stride(tensor: Any) -> tuple[int, ...] | None:
    """The strides with which a tensor without repeats is rebuilt; None: contiguous."""
    if tensor.numel() <= 1 or tuple(tensor.stride()) == _row_major(tensor.shape) or overlaps(tensor):
        return None
    reach = extent(tensor.shape, tensor.stride())
    return tuple(tensor.stride()) if reach <= _MAX_GAP_FACTOR * tensor.numel() else None


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory lie from the first to the last of such a tensor, which has some."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Also of dimensions of size 1, by whose strides convolutions tell channels_last (weights of 1 x 1)."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
