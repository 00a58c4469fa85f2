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

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.collectives.backend import Backend, Call
from lp_pipe.errors import NotSupported, PipelineError
from lp_pipe.private_torch import base_of, pytree, version_of
from lp_pipe.training.gradients import GradientNorm, norms_of
from lp_pipe.training.lasting_memory import lasting_empty
from lp_pipe.training.rng import PausableRng
from lp_pipe.training.state_shards import OwnShard, flat, is_dense
from lp_pipe.training.tensor_parts import TensorPart, memory_order, part_of_range

_BUCKET_BYTES = 4 << 20
_UPDATED = Call("updated parameters")
_PRESENT = Call("gradients that there are")
_SUMS = Call("sums of gradients")
_PARAMETERS = Call("parameters")
_GRADIENTS = Call("gradients for their norm")


class ParameterShards:
    """The shards of one replica: of each parameter the range `replica` of as many equal ones as there are replicas.

    With count=1 they are whole parameters, which the optimizer updates as shards all the same, in the host's memory.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], replica: int, count: int, zero: int) -> None:
        self.backend: Backend | None = None  # joins the replicas, in operations
        for name, parameter in named:
            if not is_dense(parameter):
                raise NotSupported(
                    f"zero={zero}: parameter {name!r} is a view with gaps in its memory: use zero=0, without offload"
                )
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

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def norms(self) -> list[tuple[nn.Parameter, GradientNorm]]:
        """Return the norms of all gradients, over all shards."""
        found = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in found if parameter.grad is not None]
        return list(zip(found, norms_of(gradients), strict=True))

    def clip(self, max_norm: float, total_norm: Tensor) -> None:
        """Scale the gradients, whose norm is `total_norm`, as torch's clip_grads_with_norm_ does."""
        nn.utils.clip_grads_with_norm_(self.parameters, max_norm, total_norm)

    @torch.no_grad()
    def share_updates(self) -> None:
        """Give all replicas the parameters of which each has updated its shards."""
        if self._count == 1:
            return
        for bucket in self._buckets(self.parameters):
            self._share_together(bucket)

    def _share_together(self, bucket: Sequence[nn.Parameter]) -> None:
        sizes = [self.size(parameter) for parameter in bucket]
        own = self._outgoing(sum(sizes), bucket[0])
        for parameter, part in zip(bucket, own.split(sizes), strict=True):
            begin, end = self.range_of(parameter)
            part[: end - begin] = flat(parameter)[begin:end]
        is_alone = self._fills_its_shards(bucket)
        whole = flat(bucket[0]) if is_alone else own.new_empty(self._count * len(own))
        self._joined().all_gather(whole, own, call=_UPDATED)
        if is_alone:
            return
        for replica, parameter, place, part in self._parts_in(whole, bucket):
            if replica != self._replica:
                flat(parameter)[place] = part

    def _parts_in(
        self, whole: Tensor, parameters: Sequence[nn.Parameter]
    ) -> Iterator[tuple[int, nn.Parameter, slice, Tensor]]:
        """Yield what was gathered: the replica, the parameter, the place of a shard in it, and the elements."""
        sizes = [self.size(parameter) for parameter in parameters]
        for replica, of_replica in enumerate(whole.view(self._count, -1)):
            for parameter, part in zip(parameters, of_replica.split(sizes), strict=True):
                begin, end = self.range_of(parameter, replica)
                yield replica, parameter, slice(begin, end), part[: end - begin]

    def _fills_its_shards(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether there is one parameter, with equal shards: what is gathered is the parameter as it is."""
        return len(parameters) == 1 and self._count * self.size(parameters[0]) == parameters[0].numel()

    def _outgoing(self, numel: int, like: Tensor) -> Tensor:
        """Return memory that other replicas can read where it is."""
        if like.device.type != "cpu":
            return like.detach().new_empty(numel)
        return self._joined().empty(numel, like.dtype)

    def _joined(self) -> Backend:
        assert self.backend is not None, "the worker joins the replicas before an operation"
        return self.backend

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


class EarlyShards:
    """The shards of layers that are built one after the other, so that no process ever has all of their parameters.

    device: where the stage computes; layers are built on any. found: of each parameter whose memory was let go.
    """

    def __init__(self, replica: int, count: int, device: torch.device) -> None:
        self._replica = replica
        self._count = count
        self._device = device
        self.found: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def take(self, layer: nn.Module) -> None:
        """Keep the own shards of a new layer, and let go of the rest of its parameters."""
        for parameter in layer.parameters():
            alone = parameter.untyped_storage().nbytes() == parameter.nbytes
            if parameter not in self.found and alone and is_dense(parameter) and parameter.device.type == "cpu":
                size = -(-parameter.numel() // self._count)
                begin = min(parameter.numel(), self._replica * size)
                own = flat(parameter)[begin : begin + size]
                self.found[parameter] = lasting_empty(len(own), own.dtype, self._device).copy_(own)
                if self._device.type != "cpu":  # what has no memory cannot be moved later
                    parameter.data = _empty_like(parameter, self._device)
                parameter.untyped_storage().resize_(0)


class BlockShards(ParameterShards):
    """The shards of a stage that is divided into blocks, with zero=2 and 3.

    Between operations a parameter's `.grad` is None; with zero=3 it has no memory either.

    blocks: the modules of each, in the order of forwards.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        replica: int,
        count: int,
        zero: int,
        blocks: Sequence[Sequence[nn.Module]],
        early: dict[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """early: the own shards of parameters that have no memory any more; they are taken out of it."""
        super().__init__(named, replica, count, zero)
        self._names = {parameter: name for name, parameter in named}
        used = [list(dict.fromkeys(p for module in block for p in module.parameters())) for block in blocks]
        owner: dict[nn.Parameter, int] = {}
        for index, parameters in enumerate(used):
            for parameter in parameters:
                owner.setdefault(parameter, index)
        self._owned = [[one for one in parameters if owner[one] == index] for index, parameters in enumerate(used)]
        self._needs = [sorted({owner[one] for one in parameters}) for parameters in used]
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._rng: PausableRng | None = None  # of the backward that goes on
        self._at = 0  # the block whose backward goes on
        self._sums = False  # whether this backward is a step's last one
        self._is_whole = [True] * len(blocks)
        self._versions: dict[nn.Parameter, int] = {}
        self._own: dict[nn.Parameter, Tensor] = {}
        self._early = early if early is not None else {}
        self._packed: list[list[Tensor]] = []  # by block and dtype: the own shards, one after the other
        self._room: dict[tuple[int, torch.dtype], Tensor] = {}  # by block: for the gradients of the own shards
        self._largest: dict[torch.dtype, int] = {}  # elements of all shards of a bucket
        for parameters in self._owned:
            for bucket in self._by_dtype(parameters):
                numel, dtype = count * sum(map(self.size, bucket)), bucket[0].dtype
                self._largest[dtype] = max(numel, self._largest.get(dtype, 0))
        for parameters in self._owned if zero == 3 else ():
            self._packed.append([self._take_shards(bucket) for bucket in self._by_dtype(parameters)])
        for index in range(len(blocks)):
            self._let_go(index)

    # ---- parameters ----

    def own(self) -> dict[nn.Parameter, OwnShard]:
        if self.zero < 3:
            return super().own()
        found = {}
        for parameter, shard in self._own.items():
            begin, end = self.range_of(parameter)
            found[parameter] = OwnShard(shard[: end - begin], begin)
        return found

    def share_updates(self) -> None:
        if self.zero < 3:  # else parameters are gathered where they are used
            super().share_updates()

    def enter(self, block: int) -> None:
        """Gather the parameters of a block."""
        for index in self._needs[block]:
            if not self._is_whole[index]:
                self._gather(index)

    def leave(self, block: int, inputs: Any, outputs: Any, *, trains: bool) -> None:
        """Let go of the parameters of a block after its forward; gather them again when its backward begins."""
        self._leave(block)
        if not trains or not self._needs[block]:
            return
        known = {id(base_of(leaf)) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)}
        for leaf in pytree.tree_leaves(outputs):
            # At a node, not at the tensor: the next layer may write to it in place, and at the base of a view, whose
            # own node is left out then.
            if isinstance(leaf, Tensor) and id(base_of(leaf)) not in known:
                node = base_of(leaf).grad_fn
                if node is not None:
                    node.register_prehook(lambda _: self._before_backward(block))

    @contextlib.contextmanager
    def drawing(self, rng: PausableRng) -> Iterator[None]:
        """Run a backward in the body, in which waits for other replicas let their threads draw."""
        with rng as self._rng:
            try:
                yield
            finally:
                self._rng = None

    def pass_by(self) -> None:
        """Make the collectives of the forward of a micro-batch that another replica has."""
        for block in range(len(self._needs)):
            self.enter(block)
            self._leave(block)

    @contextlib.contextmanager
    def backward(self, *, sums: bool) -> Iterator[None]:
        """Run the backward of a micro-batch in the body, which may be empty. sums: it is the last one of the step."""
        self._at, self._sums = len(self._needs), sums
        yield
        self._go_down_to(0)
        self._end_block()

    @contextlib.contextmanager
    def whole(self, *, gathers: bool) -> Iterator[None]:
        """Let the parameters be whole in the body. gathers: with their values; else the body writes all of them."""
        if self.zero < 3:
            yield
            return
        for index in range(len(self._owned)):
            if gathers:
                self._gather(index)
            else:
                self._make_room(index)
        try:
            yield
            if not gathers:
                self._keep_own()
        finally:
            for index in range(len(self._owned)):
                self._let_go(index)

    def parts(self) -> dict[nn.Parameter, TensorPart]:
        """Return this replica's shards of the parameters."""
        found = {}
        for parameter, shard in self.own().items():
            order = memory_order(parameter)
            found[parameter] = part_of_range(shard.elements, parameter.shape, shard.begin, order)
        return found

    @torch.no_grad()
    def set_part(self, parameter: nn.Parameter, part: TensorPart) -> None:
        """Set this replica's shard of a parameter."""
        begin, end = self.range_of(parameter)
        self._own[parameter][: end - begin] = part.flat(memory_order(parameter))

    def discard(self) -> None:
        """Forget what an operation that has failed has left."""
        self.clear_gradients()
        for index in range(len(self._owned)):
            self._let_go(index)

    # ---- gradients ----

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        return self._gradients

    def clear_gradients(self) -> None:
        super().clear_gradients()
        self._gradients = {}

    @torch.no_grad()
    def norms(self) -> list[tuple[nn.Parameter, GradientNorm]]:
        """Return the norms of all gradients: each is gathered, as the bits depend on the order of the additions."""
        found = []
        for parameter in self.parameters:
            if parameter in self._gradients:
                own = parameter.new_zeros(self.size(parameter))
                own[: len(self._gradients[parameter])] = self._gradients[parameter]
                whole = parameter.new_empty(self._count * len(own))
                self._joined().all_gather(whole, own, call=_GRADIENTS)
                gradient = whole[: parameter.numel()].as_strided(parameter.shape, parameter.stride())
                found.append((parameter, norms_of([gradient])[0]))
        return found

    @torch.no_grad()
    def clip(self, max_norm: float, total_norm: Tensor) -> None:
        factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
        for gradient in self._gradients.values():
            gradient.mul_(factor)

    # ---- the order of collectives ----

    def _before_backward(self, block: int) -> None:
        if block > self._at:
            raise NotSupported(
                f"zero={self.zero}: the backward of a layer begins after that of the layer before it (block {block} "
                f"after {self._at}), so its parameters are gone: use zero=1"
            )
        self._go_down_to(block)

    def _go_down_to(self, block: int) -> None:
        while self._at > block:
            if self._at < len(self._needs):
                self._end_block()
            self._at -= 1
            self.enter(self._at)

    def _end_block(self) -> None:
        if self._sums:
            self._sum(self._owned[self._at])
        self._leave(self._at)

    def _leave(self, block: int) -> None:
        for index in self._needs[block]:
            for parameter in self._owned[index] if self.zero == 3 else ():
                if self._versions.get(parameter) != version_of(parameter):
                    raise NotSupported(
                        f"zero=3: a forward or backward writes to parameter {self._names[parameter]!r}, which replicas "
                        "have in shards: use zero=2"
                    )
            self._let_go(index)

    # ---- memory ----

    def _by_dtype(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        found: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            found.setdefault(parameter.dtype, []).append(parameter)
        return list(found.values())

    @torch.no_grad()
    def _take_shards(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        sizes = [self.size(parameter) for parameter in parameters]
        packed = lasting_empty(sum(sizes), parameters[0].dtype, parameters[0].device).zero_()
        for parameter, own in zip(parameters, packed.split(sizes), strict=True):
            begin, end = self.range_of(parameter)
            early = self._early.pop(parameter, None)
            own[: end - begin] = flat(parameter)[begin:end] if early is None else early
            self._own[parameter] = own
            if early is None and parameter.untyped_storage().nbytes() != parameter.nbytes:  # others use its memory, too
                parameter.data = _empty_like(parameter, parameter.device).copy_(parameter)
        return packed

    @torch.no_grad()
    def _gather(self, index: int) -> None:
        self._make_room(index)
        for parameters, packed in zip(self._by_dtype(self._owned[index]), self._packed[index], strict=True):
            is_alone = self._fills_its_shards(parameters)
            whole = flat(parameters[0].data) if is_alone else packed.new_empty(self._count * len(packed))
            shared = self._outgoing(len(packed), packed).copy_(packed)
            with self._waiting():
                self._joined().all_gather(whole, shared, call=_PARAMETERS)
            if is_alone:
                continue
            for _, parameter, place, part in self._parts_in(whole, parameters):
                flat(parameter.data)[place] = part  # .data: no new version for autograd

    def _outgoing(self, numel: int, like: Tensor) -> Tensor:
        # On the host of one size, so that it is the same memory each time.
        size = max(numel, self._largest.get(like.dtype, 0)) if like.device.type == "cpu" else numel
        return super()._outgoing(size, like)[:numel]

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return self._rng.paused() if self._rng is not None else contextlib.nullcontext()

    def _make_room(self, index: int) -> None:
        for parameter in self._owned[index]:
            parameter.untyped_storage().resize_(parameter.nbytes)
            self._versions[parameter] = version_of(parameter)
        self._is_whole[index] = True

    def _let_go(self, index: int) -> None:
        if self.zero == 3 and self._is_whole[index]:
            for parameter in self._owned[index]:
                parameter.untyped_storage().resize_(0)
            self._is_whole[index] = False

    @torch.no_grad()
    def _keep_own(self) -> None:
        for parameter, own in self._own.items():
            begin, end = self.range_of(parameter)
            own[: end - begin] = flat(parameter)[begin:end]

    @torch.no_grad()
    def _sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all replicas, in their order; keep the own shards, and let go of the rest."""
        if not parameters:
            return
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise PipelineError(
                    f"replicas cannot add up the sparse gradient of {self._names[parameter]!r}: leave out sparse=True"
                )
        own = torch.tensor([parameter.grad is not None for parameter in parameters])
        table = torch.empty(self._count * len(own), dtype=torch.bool)
        with self._waiting():
            self._joined().all_gather(table, own, call=_PRESENT)
        present = table.view(self._count, -1)
        everywhere = [one for one, has in zip(parameters, present.all(0).tolist(), strict=True) if has]
        for same in self._by_dtype(everywhere):
            self._sum_together(same)
        for parameter, has in zip(parameters, present.t().tolist(), strict=True):
            if any(has) and not all(has):
                self._sum_of_some(parameter, [replica for replica, one in enumerate(has) if one])
            parameter.grad = None

    def _sum_together(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes = [self.size(parameter) for parameter in parameters]
        packed = self._outgoing(self._count * sum(sizes), parameters[0]).view(self._count, sum(sizes))
        for replica, row in enumerate(packed):
            for parameter, part in zip(parameters, row.split(sizes), strict=True):
                assert parameter.grad is not None, "all replicas have it"
                begin, end = self.range_of(parameter, replica)
                part[: end - begin] = flat(parameter.grad)[begin:end]
                part[end - begin :] = 0
        for parameter in parameters:
            parameter.grad = None
        total = self._room_for_sums(parameters[0].dtype)[: sum(sizes)]
        with self._waiting():
            self._joined().reduce_scatter(total, packed, call=_SUMS)
        for parameter, part in zip(parameters, total.split(sizes), strict=True):
            begin, end = self.range_of(parameter)
            self._gradients[parameter] = part[: end - begin]

    def _room_for_sums(self, dtype: torch.dtype) -> Tensor:
        """Return memory for the gradients of the own shards of this block, the same one in all steps."""
        key = self._at, dtype
        if key not in self._room:
            same = [parameter for parameter in self._owned[self._at] if parameter.dtype == dtype]
            self._room[key] = lasting_empty(sum(map(self.size, same)), dtype, same[0].device)
        return self._room[key]

    def _sum_of_some(self, parameter: nn.Parameter, replicas: Sequence[int]) -> None:
        """Sum a gradient that only some replicas have, of too few micro-batches."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        wholes = gradient.new_empty(self._count * gradient.numel())
        with self._waiting():
            self._joined().all_gather(wholes, flat(gradient), call=_SUMS)
        begin, end = self.range_of(parameter)
        first, *others = (wholes.view(self._count, -1)[replica][begin:end] for replica in replicas)
        total = first.clone()
        for other in others:
            total += other
        self._gradients[parameter] = total


def _empty_like(parameter: nn.Parameter, device: torch.device) -> Tensor:
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
