"""The shards of parameters, gradients and optimizer state that one replica of a worker has (ZeRO 1, 2 and 3).

                     zero=1             zero=2                    zero=3
    parameters       whole              whole                     a shard; whole while a block of layers uses them
    gradients        whole              a shard, from the end of each block's last backward on
    optimizer state  a shard            a shard                   a shard

A block is a layer, or the layers of a recomputed segment. All replicas make the same collectives in the same order:

    forward     gather 0, gather 1, …                            for each micro-batch, with zero=3
    backward    … gather 1, (sum 1,) gather 0, (sum 0)           the sums in a step's last backward alone

A replica with fewer micro-batches than another one makes the collectives of the missing ones, too (`pass_by`).
Source: ZeRO (Rajbhandari et al., 2020), sections 5 and 7.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lp_pipe.collectives.backend import Backend, Call
from lp_pipe.errors import NotSupported
from lp_pipe.training.state_shards import OwnShard, flat, is_dense

_BUCKET_BYTES = 4 << 20
_UPDATED = Call("updated parameters")
_PRESENT = Call("gradients that there are")
_SUMS = Call("sums of gradients")
_PARAMETERS = Call("parameters")


class ParameterShards:
    """The shards of one replica: of each parameter the range `replica` of as many equal ones as there are replicas."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], replica: int, count: int, zero: int) -> None:
        for name, parameter in named:
            if not is_dense(parameter):
                raise NotSupported(f"zero={zero}: parameter {name!r} is a view with gaps in its memory: use zero=0")
        self.zero = zero
        self.parameters = [parameter for _, parameter in named]
        self._replica = replica
        self._count = count

    def size(self, parameter: Tensor) -> int:
        """Return the number of elements of all shards of a parameter but the last ones, which may be smaller."""
        return -(-parameter.numel() // self._count)

    def range_of(self, parameter: Tensor, replica: int | None = None) -> tuple[int, int]:
        """Return where the shard of a replica begins and ends; without `replica` of this one."""
        size, at = self.size(parameter), self._replica if replica is None else replica
        return min(parameter.numel(), at * size), min(parameter.numel(), (at + 1) * size)

    def own(self) -> dict[nn.Parameter, OwnShard]:
        """Return this replica's shards, for the optimizer."""
        found = {}
        for parameter in self.parameters:
            begin, end = self.range_of(parameter)
            found[parameter] = OwnShard(flat(parameter)[begin:end], begin)
        return found

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the sums of this replica's shards, of the parameters that have a gradient."""
        found = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                begin, end = self.range_of(parameter)
                found[parameter] = flat(parameter.grad)[begin:end]
        return found

    @torch.no_grad()
    def share_updates(self, backend: Backend) -> None:
        """Give all replicas the parameters of which each has updated its shards."""
        for bucket in self._buckets(self.parameters):
            sizes = [self.size(parameter) for parameter in bucket]
            own = bucket[0].new_empty(sum(sizes))
            for parameter, part in zip(bucket, own.split(sizes), strict=True):
                begin, end = self.range_of(parameter)
                part[: end - begin] = flat(parameter)[begin:end]
            whole = bucket[0].new_empty(self._count * len(own))
            backend.all_gather(whole, own, call=_UPDATED)
            for replica, of_replica in enumerate(whole.view(self._count, -1)):
                for parameter, part in zip(bucket, of_replica.split(sizes), strict=True):
                    begin, end = self.range_of(parameter, replica)
                    if replica != self._replica:
                        flat(parameter)[begin:end] = part[: end - begin]

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield parameters of one dtype, as many as are sent together."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for same in by_dtype.values():
            bucket: list[nn.Parameter] = []
            for parameter in same:
                if bucket and sum(one.nbytes for one in bucket) + parameter.nbytes > _BUCKET_BYTES:
                    yield bucket
                    bucket = []
                bucket.append(parameter)
            yield bucket
