"""Tensors that have memory in common, with each other or with what a stage keeps, on their way through a cut.

Such as a tensor and a slice of it, or a buffer. Behind a cut each has memory of its own. That is the same as long as
nobody writes to one in place, which in one process would change the other.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

from torch import Tensor, nn

from lp_pipe.channels.sendable import is_copyable
from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import version_of

_WITH_MEMORY = (Tensor, nn.Parameter, nn.Buffer)  # a subclass may have none of its own


def address_of(tensor: Tensor) -> int:
    """Of its memory, of which it may be a part; 0 where it has none, or the channel refuses it, with a reason."""
    has_memory = type(tensor) in _WITH_MEMORY and is_copyable(tensor)
    return tensor.untyped_storage().data_ptr() if has_memory else 0


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The positions of those that have elements in common with another one."""
    if len(tensors) < 2:
        return ()
    of_storage: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel() and (address := address_of(tensor)):
            of_storage.setdefault(address, []).append(position)
    found: set[int] = set()
    for positions in of_storage.values():
        for pair in combinations(positions, 2):
            if _overlap(*(tensors[position] for position in pair)):
                found.update(pair)
    return tuple(sorted(found))


def lies_in(tensor: Tensor, addresses: Collection[int]) -> bool:
    """Whether its memory is one of these."""
    return bool(addresses) and address_of(tensor) in addresses


class ReadOnlyTensors:
    """Received tensors that a stage must not write to. tensors: each of the value once, in pytree order."""

    def __init__(self, tensors: Sequence[Tensor], positions: Iterable[int]) -> None:
        self._before = [(tensors[position], version_of(tensors[position])) for position in positions]

    @property
    def addresses(self) -> set[int]:
        """Of their memory."""
        return {address_of(tensor) for tensor, _ in self._before}

    def check(self) -> None:
        """
        Raises:
            PipelineError: a layer has written to one since.
        """
        if any(version_of(tensor) != version for tensor, version in self._before):
            raise PipelineError(
                "a layer writes in place to a tensor that came from another stage, where its memory is also that of "
                "another tensor that was sent, or of a parameter or buffer: in one process that would change both. (Or "
                "where it is a view, as Linear makes of three dimensions, with a hook: in one process that would not "
                "be called then.) Cut elsewhere, or write to a clone()"
            )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Exact for tensors of equal strides, such as slices of one; others count when one begins before the other ends."""
    if first.storage_offset() > second.storage_offset():
        first, second = second, first
    distance = int(second.storage_offset() - first.storage_offset())
    if first.itemsize != second.itemsize:
        return True
    if first.stride() != second.stride():
        return distance <= sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    dimensions = zip(first.stride(), first.shape, second.shape, strict=True)
    return _reaches(distance, sorted(dimensions, reverse=True))


def _reaches(distance: int, dimensions: Sequence[tuple[int, int, int]]) -> bool:
    """Whether i - j in some element of each, summed over dimensions times strides, can be the distance."""
    if not dimensions:
        return distance == 0
    (stride, size, other), *rest = dimensions
    if not stride:
        return _reaches(distance, rest)
    if sum((max(sizes) - 1) * inner for inner, *sizes in rest) >= stride:
        return True  # windows over one another, of which nothing more is said
    nearest = distance // stride
    return any(-other < steps < size and _reaches(distance - steps * stride, rest) for steps in (nearest, nearest + 1))
