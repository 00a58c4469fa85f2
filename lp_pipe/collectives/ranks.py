"""Collective operations by torch.distributed's own backends: gloo, and NCCL for tensors on GPUs. Not exact.

They add up in an order of their own, which depends on the number of ranks and on the tensor's size. They are here to
compare with, and for GPUs joined by fast links.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lp_pipe.collectives.backend import (
    Backend,
    Call,
    GenerationOver,
    check_exchanged,
    check_parts,
    check_root,
    flat_view,
    mismatch_text,
    place_of_call,
    reducing,
)
from lp_pipe.connections.routes import LOOPBACK
from lp_pipe.connections.tcp_endpoint import bracketed
from lp_pipe.errors import CollectiveMismatch
from lp_pipe.membership import Membership
from lp_pipe.private_torch import gloo_group
from lp_pipe.telemetry import waits

_dist: Any = dist  # torch's types lack some of its names
_PATIENCE = timedelta(days=365)  # a rank that does not come is named by the hang report
_MEETING_PATIENCE = timedelta(seconds=60)
_LOOK_S = 0.02  # how often a wait looks whether the generation is over
_TEXT_BYTES = 1024
_CLOSING_TAG = 1 << 30
_AT_ONCE = timedelta(milliseconds=1)


def new_rendezvous(host: str = LOOPBACK) -> str:
    """Return a "host:port" of this host at which the ranks can meet if this one is rank 0.

    Raises:
        RuntimeError: no port is free.
    """
    import portpicker  # the other backends need no port before its server exists

    try:
        return f"{bracketed(host)}:{portpicker.pick_unused_port()}"
    except portpicker.NoFreePortFoundError as error:
        raise RuntimeError(f"no TCP port of host {host} is free for torch.distributed's rendezvous") from error


class RanksBackend(Backend):
    """A rank of torch.distributed, apart from its default group.

    rendezvous: of each rank, as `new_rendezvous` gives it.
    name: "gloo", or "nccl" for tensors on GPUs; others still go through gloo.
    store: of the ranks, if they have met already, as those of a subgroup have.
    """

    is_exact: ClassVar[bool] = False
    is_authenticated: ClassVar[bool] = False

    def __init__(self, membership: Membership, rendezvous: Sequence[str], name: str, store: Any = None) -> None:
        super().__init__(membership)
        if not dist.is_available() or (name == "nccl" and not dist.is_nccl_available()):
            raise ValueError(f"backend {name!r}: this torch was built without it; use backend='auto'")
        host, _, port = rendezvous[0].rpartition(":")
        own_host = rendezvous[self.rank].rpartition(":")[0].strip("[]")
        self._rendezvous, self._name = rendezvous, name
        try:
            if store is None:
                store = _dist.TCPStore(
                    host.strip("[]"), int(port), None, self.rank == 0, _MEETING_PATIENCE, wait_for_workers=False
                )
                store = _dist.PrefixStore(f"generation {membership.generation}", store)
            self._gloo = gloo_group(_dist.ProcessGroupGloo, store, self.rank, own_host, _PATIENCE, self.world_size)
            is_nccl = name == "nccl"
            self._nccl = _dist.ProcessGroupNCCL(store, self.rank, self.world_size, _PATIENCE) if is_nccl else None
        except RuntimeError as error:
            own = membership.members[self.rank]
            raise GenerationOver(f"{own} cannot join the others by {name}: {error}") from error
        self._store = store
        self._reason = ""
        self._error: type[GenerationOver | CollectiveMismatch] = GenerationOver

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def all_reduce(self, tensor: Tensor, op: str = "sum", call: Call | None = None) -> None:
        reducing(op, tensor.dtype)
        self._begin(call or Call("all_reduce", op, tensor.dtype, tuple(tensor.shape)))
        self._reduce(flat_view(tensor), op)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str = "sum", call: Call | None = None) -> None:
        check_parts("reduce_scatter", input, output, self.world_size)
        reducing(op, input.dtype)
        self._begin(call or Call("reduce_scatter", op, input.dtype, tuple(input.shape)))
        total = flat_view(input).clone()
        self._reduce(total, op)
        start = self.rank * output.numel()
        flat_view(output).copy_(total[start : start + output.numel()])

    def all_gather(self, output: Tensor, input: Tensor, call: Call | None = None) -> None:
        check_parts("all_gather", output, input, self.world_size)
        self._begin(call or Call("all_gather", "", input.dtype, tuple(input.shape)))
        if input.numel():
            parts = list(flat_view(output).split(input.numel()))
            self._wait(self._group(input).allgather([parts], [flat_view(input)]), "all_gather")

    def broadcast(self, tensor: Tensor, root: int, call: Call | None = None) -> None:
        check_root(root, self.world_size)
        self._begin(call or Call("broadcast", "", tensor.dtype, tuple(tensor.shape), root))
        if tensor.numel():
            options = _dist.BroadcastOptions()
            options.rootRank = root
            self._wait(self._group(tensor).broadcast([flat_view(tensor)], options), "broadcast")

    def all_to_all(self, output: Tensor, input: Tensor, call: Call | None = None) -> None:
        check_exchanged(output, input, self.world_size)
        self._begin(call or Call("all_to_all", "", input.dtype, tuple(input.shape)))
        if input.numel():
            group = self._group(input)
            self._wait(group.alltoall_base(flat_view(output), flat_view(input), [], []), "all_to_all")

    def barrier(self, call: Call | None = None) -> None:
        self._begin(call or Call("barrier"))

    def agree(self, value: int, call: Call | None = None) -> bool:
        return all(other == value for other in self._begin(call or Call("agree"), value))

    def subgroup(self, ranks: Sequence[int]) -> "RanksBackend":
        membership = self.membership.of_subgroup(ranks)
        store = _dist.PrefixStore(membership.group, self._store)
        self._await_members(store, membership)
        return RanksBackend(membership, [self._rendezvous[rank] for rank in ranks], self._name, store)

    def _await_members(self, store: Any, membership: Membership) -> None:
        """Wait until all have asked for the subgroup: torch's own waiting does not end when a rank is gone."""
        with waits.waiting(waits.RANKS, waits.Target(peer="other ranks"), membership.group):
            try:
                store.set(membership.members[membership.rank], "")
                while not self._reason and not store.check(list(membership.members)):
                    time.sleep(_LOOK_S)
            except RuntimeError as error:  # rank 0 has the store
                self.abort(f"rank 0 is gone: {error}")
        if self._reason:
            raise self._error(self._reason)

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason

    def close(self) -> None:
        self.abort(f"{self.membership.members[self.rank]} has left the group")
        for other in range(self.world_size):
            if other != self.rank:  # gloo closes a connection on which a wait has timed out: so calls in progress end
                with contextlib.suppress(RuntimeError):
                    self._gloo.recv([torch.empty(1, device="cpu")], other, _CLOSING_TAG).wait(_AT_ONCE)

    def _begin(self, call: Call, value: int = 0) -> list[int]:
        """Wait until all ranks are in this call; return their values, in rank order."""
        own = torch.tensor([call.digest, value], dtype=torch.int64, device="cpu")
        table = self._told(own, str(call))
        if any(int(row[0]) != call.digest for row in table):
            text = f"{call}\n{place_of_call()}".encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
            texts = self._told(torch.frombuffer(bytearray(text), dtype=torch.uint8), "the texts of a mismatch")
            calls = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").partition("\n") for row in texts]
            self._error = CollectiveMismatch
            self.abort(
                mismatch_text(
                    self.membership.members, {rank: (text, place) for rank, (text, _, place) in enumerate(calls)}
                )
            )
            raise self._error(self._reason)
        return [int(row[1]) for row in table]

    def _told(self, own: Tensor, what: str) -> list[Tensor]:
        table = [torch.empty_like(own) for _ in range(self.world_size)]
        if self._reason:
            raise self._error(self._reason)
        self._wait(self._gloo.allgather([table], [own]), what)
        return table

    def _reduce(self, flat: Tensor, op: str) -> None:
        if not flat.numel():
            return
        options = _dist.AllreduceOptions()
        options.reduceOp = {"min": _dist.ReduceOp.MIN, "max": _dist.ReduceOp.MAX}.get(op, _dist.ReduceOp.SUM)
        self._wait(self._group(flat).allreduce([flat], options), "all_reduce")
        if op == "mean":
            flat.div_(self.world_size)

    def _group(self, tensor: Tensor) -> Any:
        return self._nccl if self._nccl is not None and tensor.is_cuda else self._gloo

    def _wait(self, work: Any, what: str) -> None:
        ended = threading.Event()
        work.get_future().add_done_callback(lambda _: ended.set())
        with waits.waiting(waits.RANKS, waits.Target(peer="other ranks"), what):
            while not ended.wait(_LOOK_S):
                if self._reason:
                    raise self._error(self._reason)
        try:
            work.wait()
        except RuntimeError as error:  # a rank's connection has ended
            self.abort(f"a rank is gone: {error}")
            raise self._error(self._reason) from error
