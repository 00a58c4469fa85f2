"""Counts the bytes that wait for the backwards: saved by autograd, or kept by a backward in two parts."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_thread = threading.local()


def current_meter() -> "ActivationMeter | None":
    """The one that counts in this thread."""
    return getattr(_thread, "meter", None)


class ActivationMeter:
    """Memory that several saved tensors share counts once; that of parameters, buffers and batches never.

    bytes: held now. peak_bytes: the most at a time. stash_bytes: the most that one forward has left to be held.
    deferred_bytes: the most that one backward for inputs has added to that until its W; below 0 where it frees more.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self.stash_bytes = 0
        self._deferred: int | None = None
        self._uncounted: set[int] = set()
        self._holders: Counter[int] = Counter()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """From now on these, and no others, do not count: they are in memory, saved or not."""
        self._uncounted = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    @contextmanager
    def counting(self) -> Iterator[Self]:
        """Count in this thread."""
        _thread.meter = self
        try:
            with saved_tensors_hooks(self.hold, _tensor_of):
                yield self
        finally:
            _thread.meter = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """One forward runs in the body."""
        before = self.bytes
        yield
        self.stash_bytes = max(self.stash_bytes, self.bytes - before)

    @property
    def deferred_bytes(self) -> int:
        return self._deferred or 0

    @contextmanager
    def backward_for_inputs(self) -> Iterator[None]:
        """One runs in the body."""
        before = self.bytes
        yield
        added = self.bytes - before
        self._deferred = added if self._deferred is None else max(self._deferred, added)

    def hold(self, tensor: Tensor) -> "Held":
        """Count a tensor as long as the result lives."""
        return Held(self, tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory counts now."""
        return tensor.untyped_storage().data_ptr() in self._holders

    def add(self, tensor: Tensor) -> int:
        """Another holder of the tensor's memory; returns its address."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._uncounted:
            self._holders[address] += 1
            if self._holders[address] == 1:
                self.bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.bytes)
        return address

    def remove(self, address: int, size: int) -> None:
        """One holder less."""
        if self._holders[address] == 1:
            self.bytes -= size
            del self._holders[address]
        elif address in self._holders:
            self._holders[address] -= 1


class Held:
    """In the graph in the place of a saved tensor; dies with the graph's need for it."""

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        # Detached: a node that saves its own result would hold itself for ever.
        self.tensor = tensor.detach()
        self._meter = meter
        self._address = meter.add(tensor)

    def __del__(self) -> None:
        self._meter.remove(self._address, self.tensor.untyped_storage().nbytes())


def held_for_later(tensors: Iterable[Tensor | None]) -> list[Held]:
    """Count these as long as the result lives, if somebody counts in this thread."""
    meter = current_meter()
    return [meter.hold(tensor) for tensor in tensors if tensor is not None] if meter is not None else []


def _tensor_of(held: Held) -> Tensor:
    return held.tensor
