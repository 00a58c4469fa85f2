"""The sum of the replicas' gradients over all workers, which does not depend on how many workers host them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lp_pipe.collectives.backend import Backend, Call
from lp_pipe.collectives.push_pull import PushPull


@dataclass(frozen=True)
class Exchange:
    """The sum of the replicas' parts over all workers, in the order of the replicas.

    counts: the number of hosted replicas, by rank.
    """

    backend: Backend | None  # None: there is one worker
    counts: Sequence[int]
    rank: int
    push_pull: PushPull | None = None  # servers that sum in place of the backend

    @property
    def slots(self) -> int:
        """The number of replicas that a worker hosts at most."""
        return max(self.counts)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that the backend reduces, on the host without copying it."""
        if self.backend is None or device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        return self.backend.empty(numel, dtype)

    def padded(self, numel: int) -> int:
        """Return a length from `numel` on that can be cut into a shard for each worker."""
        return -(-numel // len(self.counts)) * len(self.counts)

    def scratch(self, slots: Tensor, *, is_sharded: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the memory that `add` needs beside these slots, for all steps; None if it needs none.

        is_sharded: that which `add_shard` needs.
        """
        if self.backend is None or self.push_pull is not None or self.slots == 1 == min(self.counts):
            return None
        sizes = slots.numel(), slots.numel(), 0 if is_sharded else slots.shape[1]
        outgoing, incoming, total = (self.empty(size, slots.dtype, slots.device) for size in sizes)
        return outgoing, incoming, total

    def add(self, slots: Tensor, scratch: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """Return the sum of all slots [slots, numel] of all workers; all workers call this in the same order."""
        if self.backend is None:
            for part in slots[1 : self.counts[0]]:
                slots[0].add_(part)
            return slots[0]
        if scratch is None:
            self.backend.all_reduce(slots[0])
            return slots[0]
        own = self.add_shard(slots, scratch)
        self.backend.all_gather(scratch[2], own)
        return scratch[2]

    def add_shard(self, slots: Tensor, scratch: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """Return this worker's shard of the sum that `add` returns."""
        if self.backend is None:
            return self.add(slots, scratch)
        if scratch is None:
            own = self.shard_of(slots[0])
            self.backend.reduce_scatter(own, slots[0])
            return own
        # Each worker adds one shard of all slots. A sum of each worker's own sum would have another order of additions.
        outgoing, incoming, _ = scratch
        workers, shard = len(self.counts), slots.shape[1] // len(self.counts)
        outgoing.view(workers, self.slots, shard).copy_(slots.view(self.slots, workers, shard).transpose(0, 1))
        self.backend.all_to_all(incoming, outgoing)
        parts = incoming.view(workers, self.slots, shard)
        in_order = [parts[rank, slot] for rank, count in enumerate(self.counts) for slot in range(count)]
        for part in in_order[1:]:
            in_order[0].add_(part)
        return in_order[0]

    def shard_of(self, whole: Tensor) -> Tensor:
        """Return this worker's part of a tensor with one for each worker."""
        size = len(whole) // len(self.counts)
        return whole[self.rank * size : (self.rank + 1) * size]


@torch.no_grad()
def share_initial_values(backend: Backend, tensors: Iterable[Tensor]) -> None:
    """Give tensors the values that they have on rank 0, one by one, so that no worker needs memory for all of them.

    Raises:
        CollectiveMismatch: the workers' tensors differ in number, shape or dtype.
    """
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        backend.broadcast(whole, 0, call=Call("initial values", "", tensor.dtype, tuple(tensor.shape), 0))
        tensor.detach().copy_(whole)
