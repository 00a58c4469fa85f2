"""Tensors that share memory, with each other or with what a stage keeps, on their way through a cut.

Examples are a tensor and a slice of it, or a buffer. Behind a cut each has memory of its own. That makes no difference
as long as no layer writes to one in place, which in one process would change the other.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

from torch import Tensor, nn

from lp_pipe.channels.sendable import is_copyable
from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import version_of

_WITH_MEMORY = (Tensor, nn.Parameter, nn.Buffer)  # a subclass may have no memory of its own


def address_of(tensor: Tensor) -> int:
    """Return the address of the tensor's memory, of which it may be a part.

    It is 0 if the tensor has none, or if the channel will refuse it, with a reason.
    """
    has_memory = type(tensor) in _WITH_MEMORY and is_copyable(tensor)
    return tensor.untyped_storage().data_ptr() if has_memory else 0


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the positions of tensors that share elements with another one."""
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
    """Return whether the tensor's memory is one of these."""
    return bool(addresses) and address_of(tensor) in addresses


class ReadOnlyTensors:
    """Received tensors that a stage must not write to.

    tensors: each tensor of the value once, in pytree order.
    """

    def __init__(self, tensors: Sequence[Tensor], positions: Iterable[int]) -> None:
        self._before = [(tensors[position], version_of(tensors[position])) for position in positions]

    @property
    def addresses(self) -> set[int]:
        """The addresses of their memory."""
        return {address_of(tensor) for tensor, _ in self._before}

    def check(self) -> None:
        """Refuse to go on if a layer has written to one of the tensors.

        Raises:
            PipelineError: the error says what the write would have changed in one process.
        """
        if any(version_of(tensor) != version for tensor, version in self._before):
            raise PipelineError(
                "a layer writes in place to a tensor that came from another stage, where it shares memory with "
                "another tensor that was sent, or with a parameter or buffer: in one process the write would change "
                "both. (Or the tensor is a view with a hook, as Linear makes of three dimensions: in one process the "
                "write would remove the hook.) Cut elsewhere, or write to a clone()"
            )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of one memory share elements.

    It is exact for tensors of equal strides, such as slices of one tensor; others count as overlapping if one begins
    before the other ends.
    """
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
    """Return whether the distance is a sum of (i - j) * stride over dimensions, for indices i and j in the shapes."""
    if not dimensions:
        return distance == 0
    (stride, size, other), *rest = dimensions
    if not stride:
        return _reaches(distance, rest)
    if sum((max(sizes) - 1) * inner for inner, *sizes in rest) >= stride:
        return True  # windows over one another: assume that they overlap
    nearest = distance // stride
    return any(-other < steps < size and _reaches(distance - steps * stride, rest) for steps in (nearest, nearest + 1))
