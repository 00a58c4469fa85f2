"""The sum of gradients over the replicas of a worker's stages, to the same bits on each of them.

Every parameter is cut into as many shards as there are replicas. Replica k gets shard k of all replicas, adds them in
the order of the ranks, and sends the sum back. This all-reduce moves as many bytes as a ring (2(r - 1)/r of the
gradients to and from each replica), but its order of additions does not depend on the shard.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.worker.channel_ends import ChannelEnds
from lp_pipe.pipeline.worker.neighbours import Neighbours
from lp_pipe.private_torch import buffers_of
from lp_pipe.training.buffer_snapshot import BufferSnapshot, set_buffer

_CREDITS = 2  # shards, and sums


class Reduction(ChannelEnds[int]):
    """A replica's part in the sum. All replicas of the worker call `reduce` once a step."""

    def __init__(self, neighbours: Neighbours) -> None:
        super().__init__(neighbours.device)  # by the other replica
        worker, self._replica = neighbours.place
        own, ranks = neighbours.rank, neighbours.ranks.of(worker)
        self._count = len(ranks)
        others = [(replica, other) for replica, other in enumerate(ranks) if other != own]
        self._receivers = {
            replica: neighbours.receiver(f"gradients of rank {other} for {own}", _CREDITS) for replica, other in others
        }
        self._senders = {
            replica: neighbours.sender(other, f"gradients of rank {own} for {other}") for replica, other in others
        }

    def reduce(
        self, tag: int, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module], before: BufferSnapshot
    ) -> None:
        """Add up the gradients of all replicas, in rank order; all replicas get the buffers of replica 0.

        If a parameter has no gradient on some replicas (too few micro-batches), its sum is that of the others.

        modules: all of the stages. before: their buffers before the step, when all replicas had the same.

        Raises:
            PipelineError: a gradient is sparse.
            ChannelClosed: another replica has ended, or operation `tag` was aborted.
        """
        if self._count == 1:
            return
        own = [_flat(parameter.grad) for parameter in parameters]
        for replica, sender in self._senders.items():
            self._sending(sender)(tag, [self._shard(flat, replica) for flat in own])
        shards = {replica: self._receiving(receiver)(tag) for replica, receiver in self._receivers.items()}
        shards[self._replica] = [self._shard(flat, self._replica) for flat in own]
        by_rank = [shards[replica] for replica in range(self._count)]
        sums = {self._replica: [_sum(parts) for parts in zip(*by_rank, strict=True)]}
        changed = _changed(modules, before) if self._replica == 0 else {}
        for sender in self._senders.values():
            self._sending(sender)(tag, (sums[self._replica], changed))
        for replica, receiver in self._receivers.items():
            sums[replica], changed_there = self._receiving(receiver)(tag)
            changed = changed_there if replica == 0 else changed
        self._take(parameters, sums)
        if self._replica:
            before.restore()  # what only this replica's micro-batches have changed
            for (index, name), value in changed.items():
                set_buffer(modules[index], name, value)

    def _shard(self, flat: Tensor | None, replica: int) -> Tensor | None:
        if flat is None:
            return None
        start, end = (len(flat) * index // self._count for index in (replica, replica + 1))
        return flat[start:end]

    def _take(self, parameters: Sequence[nn.Parameter], sums: Mapping[int, Sequence[Tensor | None]]) -> None:
        for index, parameter in enumerate(parameters):
            if sums[0][index] is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            flat = _flat(parameter.grad)
            for replica, summed in sums.items():
                shard, total = self._shard(flat, replica), summed[index]
                assert shard is not None and total is not None, "a sum has all its shards, or none"
                shard.copy_(total)


def _changed(modules: Sequence[nn.Module], before: BufferSnapshot) -> dict[tuple[int, str], Tensor]:
    """Return the written buffers by module index and name; not all buffers, because constant masks may be large."""
    written = before.written()
    return {
        (index, name): buffer
        for index, module in enumerate(modules)
        for name, buffer in buffers_of(module).items()
        if buffer is not None and (module, name) in written
    }


def _flat(gradient: Tensor | None) -> Tensor | None:
    """Return the gradient as it lies in memory: autograd gives it its parameter's strides, which are dense."""
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise PipelineError(
            "replicas cannot add up sparse gradients, such as those of nn.Embedding(…, sparse=True). Leave out "
            "sparse=True, or give this stage one replica"
        )
    return gradient.as_strided((gradient.numel(),), (1,))


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if len(present) == 1:
        return present[0].clone()
    total = present[0] + present[1]
    for part in present[2:]:
        total += part
    return total
