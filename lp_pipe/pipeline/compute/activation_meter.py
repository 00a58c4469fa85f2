"""Count the bytes that wait for backwards: tensors saved by autograd, or kept by a backward in two parts."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lp_pipe.private_torch import sparse_indices, sparse_values

_thread = threading.local()


def current_meter() -> "ActivationMeter | None":
    """Return the meter that counts in this thread."""
    return getattr(_thread, "meter", None)


class ActivationMeter:
    """A counter of the memory of saved tensors.

    Memory that several saved tensors share counts once; that of parameters, buffers and batches does not count.

    bytes: now.
    peak_bytes: the largest value of `bytes`.
    stash_bytes: the most that one forward has added.
    deferred_bytes: the most that one backward for inputs has added until its W; below 0 if it frees more than it adds.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self.stash_bytes = 0
        self._deferred: int | None = None
        self._uncounted: set[int] = set()
        self._holders: Counter[int] = Counter()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors from now on, and count all others.

        They are in memory whether autograd saves them or not.
        """
        self._uncounted = {memory_of(tensor)[0] for tensor in tensors}

    @contextmanager
    def counting(self) -> Iterator[Self]:
        """Count the tensors that autograd saves in this thread in the body."""
        _thread.meter = self
        try:
            with saved_tensors_hooks(self.hold, _tensor_of):
                yield self
        finally:
            _thread.meter = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measure the forward that runs in the body."""
        before = self.bytes
        yield
        self.stash_bytes = max(self.stash_bytes, self.bytes - before)

    @property
    def deferred_bytes(self) -> int:
        """The most that a backward for inputs has added until its W; 0 if no backward was split."""
        return self._deferred or 0

    @contextmanager
    def backward_for_inputs(self) -> Iterator[None]:
        """Measure the backward for inputs that runs in the body."""
        before = self.bytes
        yield
        added = self.bytes - before
        self._deferred = added if self._deferred is None else max(self._deferred, added)

    def hold(self, tensor: Tensor) -> "CountedTensor":
        """Count a tensor as long as the returned object lives."""
        return CountedTensor(self, tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory counts now."""
        return memory_of(tensor)[0] in self._holders

    def add(self, tensor: Tensor) -> int:
        """Add a holder of the tensor's memory; return the memory's address."""
        address, size = memory_of(tensor)
        if address not in self._uncounted:
            self._holders[address] += 1
            if self._holders[address] == 1:
                self.bytes += size
                self.peak_bytes = max(self.peak_bytes, self.bytes)
        return address

    def remove(self, address: int, size: int) -> None:
        """Remove a holder of the memory."""
        if self._holders[address] == 1:
            self.bytes -= size
            del self._holders[address]
        elif address in self._holders:
            self._holders[address] -= 1


class CountedTensor:
    """The object that the graph has in place of a saved tensor; it dies when the graph no longer needs the tensor."""

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        # Detached: a node that saves its own result would keep itself alive.
        self.tensor = tensor.detach()
        self._meter = meter
        self._address = meter.add(tensor)

    def __del__(self) -> None:
        self._meter.remove(self._address, memory_of(self.tensor)[1])


def bytes_of(tensor: Tensor) -> int:
    """Return the tensor's size if it shares its memory with no other; for a sparse one, that of all its parts."""
    return tensor.nbytes if tensor.layout is torch.strided else memory_of(tensor)[1]


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the tensor's memory, and its bytes.

    For a sparse tensor: the address of its values, and the bytes of all its parts.
    """
    storages = [part.untyped_storage() for part in _parts(tensor)]
    return storages[0].data_ptr(), sum(storage.nbytes() for storage in storages)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return sparse_values(tensor), sparse_indices(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.values(), tensor.crow_indices(), tensor.col_indices()
    return tensor.values(), tensor.ccol_indices(), tensor.row_indices()


def held_for_later(tensors: Iterable[Tensor | None]) -> list[CountedTensor]:
    """Count these tensors as long as the result lives, if a meter counts in this thread."""
    meter = current_meter()
    return [meter.hold(tensor) for tensor in tensors if tensor is not None] if meter is not None else []


def _tensor_of(held: CountedTensor) -> Tensor:
    return held.tensor
