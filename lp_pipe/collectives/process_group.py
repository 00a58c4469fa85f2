"""A torch ProcessGroup over a group: DDP, FSDP2, ZeroRedundancyOptimizer, DeviceMesh and DCP use it as they are.

Over an exact backend their sums are in rank order. Every call ends before it returns.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lp_pipe.collectives.backend import Backend
from lp_pipe.collectives.inproc import InprocBackend
from lp_pipe.membership import Membership
from lp_pipe.private_torch import finished_work

NAME = "lp_pipe"  # of the backend, as torch.distributed knows it
_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean", dist.ReduceOp.MIN: "min", dist.ReduceOp.MAX: "max"}


_dist: Any = dist  # torch's types lack some of its names


class ExactProcessGroup(_dist.ProcessGroup):  # type: ignore[misc]
    """The operations of torch.distributed on the backend of a group."""

    def __init__(self, backend: Backend, name: str) -> None:
        super().__init__(backend.rank, backend.world_size)
        self._backend = backend
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        op = _op_of(opts)
        for tensor in tensors:
            _in_place(tensor, lambda flat: self._backend.all_reduce(flat, op))
        return finished_work(list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        op = _op_of(opts)
        for tensor in tensors:
            total = tensor.contiguous().clone()
            self._backend.all_reduce(total, op)
            if self._backend.rank == opts.rootRank:
                tensor.copy_(total)
        return finished_work(list(tensors))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            _in_place(tensor, lambda flat: self._backend.broadcast(flat, opts.rootRank if opts else 0))
        return finished_work(list(tensors))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._gather_into(parts, tensor)
        return finished_work([list(parts) for parts in outputs])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for index, tensor in enumerate(inputs):
            self._gather_into([of_rank[index] for of_rank in outputs], tensor)
        return finished_work([list(of_rank) for of_rank in outputs])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        _in_place(output, lambda flat: self._backend.all_gather(flat, input.contiguous()))
        return finished_work([output])

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return finished_work(list(outputs))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_parts(output, parts, _op_of(opts))
        return finished_work(list(outputs))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        op = _op_of(opts)
        _in_place(output, lambda flat: self._backend.reduce_scatter(flat, input.contiguous(), op))
        return finished_work([output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return finished_work(list(outputs))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for index, tensor in enumerate(inputs):
            is_root = self._backend.rank == opts.rootRank
            parts = outputs[index] if is_root else [torch.empty_like(tensor) for _ in range(self._backend.world_size)]
            self._gather_into(parts, tensor)
        return finished_work([list(parts) for parts in outputs])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        count = self._backend.world_size
        for index, output in enumerate(outputs):
            is_root = self._backend.rank == opts.rootRank
            sent = torch.stack(list(inputs[index])) if is_root else output.new_empty((count, *output.shape))
            self._backend.broadcast(sent, opts.rootRank)
            output.copy_(sent[self._backend.rank])
        return finished_work(list(outputs))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Exchange tensors of any sizes: each rank gets all, padded to the largest, and takes its own."""
        self._exchange(list(outputs), list(inputs))
        return finished_work(list(outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:
        if not output_split_sizes and not input_split_sizes:
            _in_place(output, lambda flat: self._backend.all_to_all(flat, input.contiguous()))
        else:
            count = self._backend.world_size
            received = output.split(list(output_split_sizes or [len(output) // count] * count))
            self._exchange(received, input.split(list(input_split_sizes or [len(input) // count] * count)))
        return finished_work([output])

    def barrier(self, opts: Any = None) -> Any:
        self._backend.barrier()
        return finished_work([])

    def _gather_into(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        whole = torch.empty(len(parts) * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self._backend.all_gather(whole, tensor.contiguous())
        for part, gathered in zip(parts, whole.chunk(len(parts)) if tensor.numel() else parts, strict=True):
            part.copy_(gathered.view(part.shape))

    def _reduce_parts(self, output: Tensor, parts: Sequence[Tensor], op: str) -> None:
        whole = torch.cat([part.reshape(-1) for part in parts])
        _in_place(output, lambda flat: self._backend.reduce_scatter(flat, whole, op))

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        most = torch.tensor([max(part.numel() for part in (*received, *sent))], device="cpu")
        self._backend.all_reduce(most, "max")
        size = int(most)
        padded = sent[0].new_zeros(len(sent) * size)
        for rank, part in enumerate(sent):
            padded[rank * size : rank * size + part.numel()] = part.reshape(-1)
        arrived = torch.empty_like(padded)
        self._backend.all_to_all(arrived, padded)
        for rank, part in enumerate(received):
            part.copy_(arrived[rank * size : rank * size + part.numel()].view(part.shape))

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def open_process_group(backend: Backend) -> dist.ProcessGroup:
    """Make torch.distributed use this backend in this process, as its default group; return that.

    `dist.destroy_process_group()` ends it.

    Raises:
        RuntimeError: torch.distributed is in use, or the ranks are threads, of which it knows only one per process.
    """
    if isinstance(backend, InprocBackend) and backend.world_size > 1:
        raise RuntimeError(
            "torch.distributed has one rank per process, and these ranks are threads of one: "
            "launch the program with mode='process'"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed already has a default process group in this process: call "
            "torch.distributed.destroy_process_group() first"
        )
    _register()
    _opening.backend = backend
    try:
        dist.init_process_group(
            NAME, store=_dist.HashStore(), rank=backend.rank, world_size=backend.world_size, timeout=_FOR_EVER
        )
    finally:
        del _opening.backend
    group = dist.group.WORLD
    assert group is not None
    _backends[group.group_name] = backend
    return group


_FOR_EVER = timedelta(days=365)  # a rank that does not come is named by the hang report
_opening = threading.local()
_backends: dict[str, Backend] = {}


def _register() -> None:
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> ExactProcessGroup:
    """Return a group for `init_process_group`, or for `new_group` with all ranks or one."""
    backend = getattr(_opening, "backend", None)
    if backend is None:
        world = dist.group.WORLD
        assert isinstance(world, ExactProcessGroup)
        backend = _sub_backend(world._backend, list(options.global_ranks_in_group), options.group_id)
    return ExactProcessGroup(backend, options.group_id)


def _sub_backend(whole: Backend, ranks: Sequence[int], name: str) -> Backend:
    if len(ranks) in (0, whole.world_size):
        return whole
    if len(ranks) == 1:
        member = whole.membership.members[whole.rank]
        return InprocBackend(Membership(name, whole.membership.generation, 0, (member,), (name.encode(),)))
    raise RuntimeError(
        f"a process group over lp_pipe's collectives has all {whole.world_size} ranks or one, got ranks {list(ranks)}"
    )


def _op_of(opts: Any) -> str:
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    for known, name in _OPS.items():
        if op == known:
            return name
    raise ValueError(f"the reduction must be SUM, AVG, MIN or MAX, got {op}")


def _in_place(tensor: Tensor, operate: Callable[[Tensor], None]) -> None:
    """Run an operation that writes to a contiguous tensor."""
    if tensor.is_contiguous():
        operate(tensor)
        return
    contiguous = tensor.contiguous()
    operate(contiguous)
    with torch.no_grad():
        tensor.copy_(contiguous)
