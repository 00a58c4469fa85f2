"""The part of a tensor that one worker has of it, where workers share a tensor's elements (ZeRO, FSDP2).

torch Distributed Checkpoint knows boxes of a tensor: an offset and a size in each dimension. A range of the elements in
memory order is at most 2·dimensions - 1 boxes:

    elements 2 to 9 of a 4 × 3 tensor        boxes: offset, size
        . . #                                (0, 2), (1, 1)
        # # #                                (1, 0), (2, 3)
        # # #
        . . .
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lp_pipe.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size


class TensorPart(NamedTuple):
    """The part of a tensor that one worker has, which may be nothing.

    shape: of the whole tensor. values: the elements in each of the boxes, in the box's shape.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    values: tuple[Tensor, ...]

    def flat(self, order: tuple[int, ...] | None = None) -> Tensor:
        """Return the elements in memory order, if the boxes are those of a range in that `order`."""
        parts = [(value if order is None else value.permute(order)).reshape(-1) for value in self.values]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from the outermost to the innermost in memory; None: the usual order."""
    if tensor.is_contiguous():
        return None
    return tuple(
        sorted(range(tensor.dim()), key=lambda dimension: (-tensor.stride()[dimension], -tensor.shape[dimension]))
    )


def part_of_range(values: Tensor, shape: Sequence[int], begin: int, order: tuple[int, ...] | None = None) -> TensorPart:
    """Return `values`, of one dimension, as the elements from number `begin` on of a tensor of that shape.

    order: `memory_order` of the tensor.
    """
    shape = tuple(shape)
    permuted = boxes_of_range(_permuted(shape, order), begin, begin + values.numel())
    pieces = values.split([math.prod(size) for _, size in permuted])
    found = [piece.view(size) for piece, (_, size) in zip(pieces, permuted, strict=True)]
    if order is not None:
        found = [piece.permute(_inverse(order)) for piece in found]
    return TensorPart(shape, values.dtype, boxes_of_range(shape, begin, begin + values.numel(), order), tuple(found))


@functools.lru_cache(maxsize=4096)
def boxes_of_range(
    shape: tuple[int, ...], begin: int, end: int, order: tuple[int, ...] | None = None
) -> tuple[Box, ...]:
    """Return the boxes with the elements from number `begin` to `end`, in memory order."""
    if order is not None:
        found, back = boxes_of_range(_permuted(shape, order), begin, end), _inverse(order)
        return tuple((_permuted(offset, back), _permuted(size, back)) for offset, size in found)
    if begin >= end:
        return ()
    if len(shape) <= 1:
        return (((begin,) * len(shape), (end - begin,) * len(shape)),)
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:  # within one row
        return _in_row(shape, last, begin - last * row, end - last * row)
    boxes = _in_row(shape, first - 1, row - (first * row - begin), row) if begin < first * row else ()
    if first < last:
        boxes += (((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])),)
    return boxes + _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> tuple[Box, ...]:
    return tuple(((row, *offset), (1, *size)) for offset, size in boxes_of_range(shape[1:], begin, end))


def _permuted(numbers: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    return numbers if order is None else tuple(numbers[dimension] for dimension in order)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(dimension) for dimension in range(len(order)))


def as_part(value: Tensor) -> Tensor | TensorPart:
    """Return what this worker has of a DTensor; any other tensor itself."""
    if type(value) in (Tensor, nn.Parameter) or not hasattr(value, "__create_chunk_list__"):
        return value
    sharded: Any = value.detach()
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in sharded.__create_chunk_list__()]
    boxes = tuple(box for box in chunks if math.prod(box[1]))
    local = sharded.to_local()
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    return TensorPart(tuple(value.shape), value.dtype, boxes, (local,) * len(boxes))


def check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Refuse boxes that do not have each element of a tensor once.

    Raises:
        CheckpointError: says how many elements are missing, or which boxes overlap.
    """
    wrong = _wrong(shape, tuple(boxes))
    if wrong:
        raise CheckpointError(f"the parts of {name} {list(shape)} are not the whole of it: {wrong}")


@functools.lru_cache(maxsize=4096)
def _wrong(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> str:
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            if all(
                offset < start + length and start < offset + size
                for offset, size, start, length in zip(*box, *other, strict=True)
            ):
                return f"{box} and {other} overlap"
    found, all_ = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    return "" if found == all_ else f"they have {found} of its {all_} elements"
