"""Collective operations among ranks that see each other's tensors: threads of a process, processes of a host.

all_reduce        rank 0             rank 1                    x_r: the tensor of rank r
  arrive          ─────────── all tensors are complete ──────
  reduce          part 0 of x_0, x_1  part 1 of x_0, x_1       in rank order, written to this part of all tensors
  arrive          ─────────── all parts are written ─────────
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lp_pipe.collectives.backend import Backend, Call, check_exchanged, check_parts, check_root, flat_view, reducing

_PIECE_BYTES = 128 << 10  # the operands of one addition stay in the processor's cache
_BROADCAST_BYTES = 4 << 20  # memory that is shared stays: a whole model need not have a copy there
_LINE = 64  # elements: no two ranks write to one cache line

_BARRIER = Call("barrier")
_AGREE = Call("agree")
_LEAVE = Call("leave")  # the second half of an operation

Parts = Sequence[Tensor]  # the same piece of all ranks' tensors, in rank order


class SharedMemoryBackend(Backend):
    """The operations; a subclass lets ranks wait for each other and see each other's tensors."""

    is_exact: ClassVar[bool] = True

    @abstractmethod
    def _arrive(self, call: Call, shown: Any) -> Sequence[Any]:
        """Wait until all ranks are in this call; return what they have shown, in rank order.

        Raises:
            GenerationOver: not all will come.
            CollectiveMismatch: another rank is in another call.
        """

    @abstractmethod
    def _share(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor itself if other ranks can see its memory, else a copy that they can see; and what to show.

        What is shown tells them where the tensor is.
        """

    @abstractmethod
    def _tensor(self, rank: int, shown: Any, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor that a rank has shown."""

    def _tensors(self, shown: Sequence[Any], numel: int, dtype: torch.dtype) -> Parts:
        return [self._tensor(rank, one, numel, dtype) for rank, one in enumerate(shown)]

    def _pieces(self, shown: Sequence[Any], numel: int, dtype: torch.dtype) -> Sequence[Parts]:
        """Return the pieces of this rank's part of the tensors that all ranks have shown."""
        tensors = self._tensors(shown, numel, dtype)
        per_rank = -(-numel // self.world_size // _LINE) * _LINE if numel else 0
        start, end = (min(numel, rank * per_rank) for rank in (self.rank, self.rank + 1))
        return list(_cut(tensors, start, end, dtype.itemsize))

    def all_reduce(self, tensor: Tensor, op: str = "sum", call: Call | None = None) -> None:
        dtype = tensor.dtype
        reduce, divisor = reducing(op, dtype), self.world_size if op == "mean" else 1
        flat = flat_view(tensor)
        shared, place = self._share(flat)
        call = call or Call("all_reduce", op, dtype, tuple(tensor.shape))
        for parts in self._pieces(self._arrive(call, place), len(flat), dtype):
            total, *others = parts
            for other in others:
                reduce(total, other, out=total)
            if divisor > 1:
                total.div_(divisor)
            for other in others:
                other.copy_(total)
        self._arrive(_LEAVE, None)
        if shared is not flat:
            flat.copy_(shared)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str = "sum", call: Call | None = None) -> None:
        dtype, count = input.dtype, output.numel()
        reduce, divisor = reducing(op, dtype), self.world_size if op == "mean" else 1
        check_parts("reduce_scatter", input, output, self.world_size)
        (flat, place), result = self._share(flat_view(input)), flat_view(output)
        added = result if result.is_cpu else self.empty(count, dtype)
        call = call or Call("reduce_scatter", op, dtype, tuple(input.shape))
        tensors = self._tensors(self._arrive(call, place), len(flat), dtype)
        start = self.rank * count
        at = 0
        for parts in _cut(tensors, start, start + count, dtype.itemsize):
            total = parts[0].clone()  # `output` may be a part of `input`
            for other in parts[1:]:
                reduce(total, other, out=total)
            if divisor > 1:
                total.div_(divisor)
            added[at : at + len(total)].copy_(total)
            at += len(total)
        self._arrive(_LEAVE, None)
        if added is not result:
            result.copy_(added)

    def all_gather(self, output: Tensor, input: Tensor, call: Call | None = None) -> None:
        check_parts("all_gather", output, input, self.world_size)
        flat, place = self._share(flat_view(input))
        call = call or Call("all_gather", "", input.dtype, tuple(input.shape))
        tensors = self._tensors(self._arrive(call, place), len(flat), input.dtype)
        for part, tensor in zip(flat_view(output).chunk(self.world_size), tensors, strict=False):
            part.copy_(tensor)
        self._arrive(_LEAVE, None)

    def broadcast(self, tensor: Tensor, root: int, call: Call | None = None) -> None:
        check_root(root, self.world_size)
        call = call or Call("broadcast", "", tensor.dtype, tuple(tensor.shape), root)
        for piece in flat_view(tensor).split(_BROADCAST_BYTES // tensor.dtype.itemsize):
            shared, shown = self._share(piece) if self.rank == root else (piece, None)
            of_ranks = self._arrive(call, shown)
            if self.rank != root:
                piece.copy_(self._tensor(root, of_ranks[root], len(piece), tensor.dtype))
            self._arrive(_LEAVE, None)
            del shared  # its memory must last until all have read it

    def all_to_all(self, output: Tensor, input: Tensor, call: Call | None = None) -> None:
        check_exchanged(output, input, self.world_size)
        flat, place = self._share(flat_view(input))
        call = call or Call("all_to_all", "", input.dtype, tuple(input.shape))
        tensors = self._tensors(self._arrive(call, place), len(flat), input.dtype)
        count = len(flat) // self.world_size
        result, start = flat_view(output), self.rank * count
        for rank, tensor in enumerate(tensors):
            result[rank * count : (rank + 1) * count].copy_(tensor[start : start + count])
        self._arrive(_LEAVE, None)

    def barrier(self, call: Call | None = None) -> None:
        self._arrive(call or _BARRIER, None)

    def agree(self, value: int, call: Call | None = None) -> bool:
        values = self._arrive(call or _AGREE, value)
        return all(other == value for other in values)


def _cut(tensors: Parts, start: int, end: int, itemsize: int) -> Iterator[Parts]:
    length = _PIECE_BYTES // itemsize
    for at in range(start, end, length):
        yield [tensor[at : min(end, at + length)] for tensor in tensors]
