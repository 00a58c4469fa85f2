"""A model whose parameters are sharded over the workers (ZeRO 2 and 3), by torch's FSDP2, with exact sums.

    unit       block 0          block 1          the rest           each is gathered as a whole
    worker 0   rows 0 … of all parameters                           a shard: some rows of each parameter
    worker 1   the next rows

A unit's parameters are gathered before its forward and its backward, and its gradients are summed after its backward.
FSDP2 does that; this module decides what the units are, how sums are made, and what a state_dict holds.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lp_pipe.collectives.backend import Call
from lp_pipe.data_parallel.exchange import Exchange, share_initial_values
from lp_pipe.data_parallel.gradient_sums import BucketSum, GradientSums
from lp_pipe.errors import DataParallelError
from lp_pipe.private_torch import buffers_of, norms_of_each, parameters_of
from lp_pipe.training.lasting_memory import keep_no_holes, lasting, lasting_empty
from lp_pipe.training.state_shards import OwnShard, flat

_FLAGS = Call("flags of gradients")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ShardedModel:
    """A model that `fully_shard` has sharded over a process group.

    Its state_dict() has whole tensors, which all workers must ask for together, and its load_state_dict() takes them.

    zero: 3: a unit's whole parameters are let go between its forward and its backward; 2: they are not.
    device: of a model that is on the meta device; others stay where they are.

    Raises:
        DataParallelError: the model is on several devices, or cannot be filled.
    """

    def __init__(
        self, model: nn.Module, zero: int, exchange: Exchange, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.model = model
        self.zero = zero
        self._whole: dict[str, Tensor] | None = None  # the whole state, while one worker saves it
        self._is_raw = False
        is_meta = any(tensor.is_meta for tensor in model.state_dict(keep_vars=True).values())
        if not is_meta and exchange.backend is not None:
            share_initial_values(exchange.backend, (*model.parameters(), *model.buffers()))
        if zero == 3:
            keep_no_holes()
        device = _device_of(model, device)
        mesh = DeviceMesh.from_group(group, device.type)
        units = [*units_of(model), model]
        # FSDP2 takes the current GPU for the mesh's.
        is_current: Any = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with lasting(), is_current:
            for unit in units:
                fully_shard(unit, mesh=mesh, reshard_after_forward=zero == 3)
        assert isinstance(model, FSDPModule)
        self._fsdp: FSDPModule = model
        self.sums = [_OrderedSum(exchange, keeps_room=zero == 3) for unit in units if isinstance(unit, FSDPModule)]
        for unit, unit_sum in zip(units, self.sums, strict=True):
            assert isinstance(unit, FSDPModule)
            unit.set_custom_reduce_scatter(cast(Any, unit_sum))  # the base class has a private name
            unit.set_custom_all_gather(cast(Any, _SharedGather(exchange)))
            unit.set_gradient_divide_factor(1.0)
        if is_meta:
            with lasting(), is_current:
                _initialize(model, device)
        hooked: Any = model  # torch's types lack these
        hooked.register_state_dict_post_hook(partial(self._make_whole))  # a method takes none of torch's marks
        hooked.register_load_state_dict_pre_hook(self._take_own)

    def set_reduces(self, reduces: bool) -> None:
        """Say whether the next backward is the last one of a replica, after which its gradient is summed."""
        self._fsdp.set_requires_gradient_sync(reduces)
        if self.zero == 2:
            self._fsdp.set_reshard_after_backward(reduces)

    def gradients(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        exchange: Exchange,
        extra_flags: Callable[[], Sequence[float]],
    ) -> "ShardedGradients":
        """Return the sums of gradients for an optimizer of these parameters."""
        return ShardedGradients(self, named_parameters, exchange, extra_flags)

    @property
    def is_gathered(self) -> bool:
        """Whether this worker alone may ask for the state."""
        return self._whole is not None

    def parts(self) -> dict[str, Any]:
        """Return the state as FSDP2 has it: DTensors in place of what is sharded."""
        self._is_raw = True
        try:
            return dict(self.model.state_dict())
        finally:
            self._is_raw = False

    @contextlib.contextmanager
    def whole_state(self, *, keeps: bool) -> Iterator[None]:
        """Let workers call `state_dict` in the body, which all workers enter. keeps: whether this one does."""
        whole = {}
        for name, value in self.parts().items():
            if isinstance(value, DTensor):
                gathered = value.full_tensor()
                if keeps:
                    whole[name] = gathered
        self._whole = whole
        try:
            yield
        finally:
            self._whole = None

    def _make_whole(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if self._is_raw:
            return
        for name, value in state.items():
            if isinstance(value, DTensor):
                state[name] = value.full_tensor() if self._whole is None else self._whole[name]

    def _take_own(self, _: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            value = state.get(name)
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                continue
            if isinstance(parameter, DTensor) and value.shape == parameter.shape:
                state[name] = _cut_like(parameter, value)


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model whose parameters are gathered together: the children of its containers.

    A part that shares a parameter with another one is none: it belongs to the rest.
    """
    found: dict[nn.Module, None] = {}

    def look_into(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
                found[child] = None
            else:
                look_into(child)

    look_into(model)
    parts: list[tuple[nn.Module | None, Iterable[Tensor]]] = [(unit, unit.parameters()) for unit in found]
    inside = {module for unit in found for module in unit.modules()}
    for module in set(model.modules()) - inside:
        parts.append((None, [value for value in parameters_of(module).values() if value is not None]))
    owners: dict[int, set[nn.Module | None]] = {}
    for unit, parameters in parts:
        for parameter in parameters:
            owners.setdefault(id(parameter), set()).add(unit)
    shared = {unit for units in owners.values() if len(units) > 1 for unit in units}
    return [unit for unit in found if unit not in shared and next(unit.parameters(), None) is not None]


def own_shard(parameter: nn.Parameter) -> OwnShard:
    """Return this worker's rows of a sharded parameter."""
    assert isinstance(parameter, DTensor)
    rows = parameter.to_local().detach()
    return OwnShard(flat(rows), _first_row(parameter) * parameter.shape[1:].numel())


class ShardedGradients(GradientSums):
    """The sums of a sharded model's gradients: FSDP2 makes them in the last backward of each hosted replica.

    extra_flags: returns this worker's other flags; called once a step.
    """

    def __init__(
        self,
        model: ShardedModel,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        exchange: Exchange,
        extra_flags: Callable[[], Sequence[float]],
    ) -> None:
        self._model = model
        self._parameters = [parameter for _, parameter in named_parameters]
        self._exchange = exchange
        self._extra = extra_flags
        self._flags: list[float] = []

    @property
    def count(self) -> int:
        return len(self._model.sums)

    @property
    def sums(self) -> Sequence[BucketSum]:
        return ()  # they are a part of the backward

    @property
    def fires_in_window(self) -> int:
        return 0  # all workers make the collectives of a backward at the same place among the user's

    @property
    def extra_flags(self) -> list[float]:
        return self._flags

    def begin_step(self) -> None:
        for unit_sum in self._model.sums:
            unit_sum.begin_step()
        self._model.set_reduces(True)

    def select(self, slot: int, *, is_last: bool) -> None:
        for unit_sum in self._model.sums:
            unit_sum.slot = slot
        self._model.set_reduces(is_last)

    def open_window(self, *, sends_early: bool) -> None:
        """Do nothing: `select` has said that the shard is the last one."""

    def close_window(self) -> None:
        """Do nothing: nothing is summed in another thread."""

    def drain(self) -> None:
        """Do nothing: what is summed before the step was summed in a backward."""

    def finish(self) -> None:
        for unit_sum in self._model.sums:
            unit_sum.finish()
        flags = torch.tensor([*self._extra()], dtype=torch.float32)
        if self._exchange.backend is not None:
            self._exchange.backend.all_reduce(flags, call=_FLAGS)
        self._flags = flags.tolist()

    def learn(self) -> None:
        """Do nothing: all steps are alike."""

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """Scale the gradients. The norm has torch's bits: each gradient is gathered for it, one after the other."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            return
        norms = [norms_of_each([gradient.full_tensor()])[0] for gradient in gradients if isinstance(gradient, DTensor)]
        total = torch.linalg.vector_norm(torch.stack(norms))
        scaled = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as nn.utils.clip_grads_with_norm_ has it
        for gradient in scaled:
            gradient.mul_(factor)

    def own_shards(self, parameters: Iterable[nn.Parameter], rank: int | None = None) -> dict[nn.Parameter, OwnShard]:
        assert rank is None, "no worker has others' shards"
        return {parameter: own_shard(parameter) for parameter in parameters}

    def shard_gradients(self, rank: int | None = None) -> dict[nn.Parameter, Tensor]:
        assert rank is None, "no worker has others' gradients"
        return {
            parameter: flat(parameter.grad.to_local())
            for parameter in self._parameters
            if isinstance(parameter.grad, DTensor)
        }

    def share_updates(self) -> None:
        """Do nothing: parameters are gathered where they are used."""

    def close(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _SharedGather:
    """Gathers the parameters of a unit in memory that is used again, and that other workers read where it is."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        return self._exchange.empty(numel, dtype, device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        if self._exchange.backend is None:
            output_tensor.copy_(input_tensor)
        else:
            self._exchange.backend.all_gather(output_tensor, input_tensor)


class _OrderedSum:
    """Sums the gradient of a unit over all replicas, in their order, in place of FSDP2's own reduce-scatter.

    keeps_room: whether the gradient of a shard has the same memory in all steps. Without, it is taken in each backward,
        from what the whole parameters have just let go.
    slot: the number of the hosted replica whose gradient comes next.
    """

    def __init__(self, exchange: Exchange, *, keeps_room: bool) -> None:
        self._exchange = exchange
        self._keeps_room = keeps_room
        self.slot = 0
        self._parts: dict[int, Tensor] = {}  # by slot: this worker's shard of the gradient of each worker's replica
        self._output: Tensor | None = None  # in whose memory the parameters' gradients are
        self._has_input = False  # whether FSDP2 has asked for the memory of a gradient, and asks next for its shard's
        self._room: Tensor | None = None  # for the shard, in all steps

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        if self._exchange.backend is None:  # FSDP2 has the gradient in this memory, and sums nothing
            return lasting_empty(numel, dtype, device)
        if not self._has_input:
            self._has_input = True
            return self._exchange.empty(numel, dtype, device)
        if not self._keeps_room:
            return torch.empty(numel, dtype=dtype, device=device)
        if self._room is None or (len(self._room), self._room.dtype) != (numel, dtype):
            self._room = lasting_empty(numel, dtype, device)
        return self._room

    def begin_step(self) -> None:
        self.slot, self._output, self._has_input = 0, None, False
        self._parts.clear()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, op: Any = None, async_op: bool = False
    ) -> None:
        self._has_input = False
        if self.slot in self._parts:
            raise DataParallelError(
                "a sharded model got a second backward after its gradients were summed: take all micro-batches of a "
                "step from one call, replica.shards(batch, microbatches=m), with one backward for each"
            )
        backend = self._exchange.backend
        assert backend is not None, "FSDP2 sums nothing for one worker"
        if self._exchange.slots == 1:
            self._parts[self.slot] = output_tensor
            backend.reduce_scatter(output_tensor, input_tensor)
            return
        self._parts[self.slot] = torch.empty_like(input_tensor)
        backend.all_to_all(self._parts[self.slot], input_tensor)
        if self._output is None:
            self._output = output_tensor
        output_tensor.zero_()

    def finish(self) -> None:
        if self._output is None:
            return
        workers = len(self._exchange.counts)
        in_order = [
            self._parts[slot].view(workers, -1)[rank]
            for rank, count in enumerate(self._exchange.counts)
            for slot in range(count)
        ]
        total = in_order[0]
        for part in in_order[1:]:
            total.add_(part)
        self._output.copy_(total)
        self._parts.clear()


def _first_row(parameter: DTensor) -> int:
    """Return the first row of a sharded parameter that this worker has. Rows are divided as torch.chunk does it."""
    workers, rank = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    rows = parameter.shape[0]
    return min(rows, rank * -(-rows // workers))


def _cut_like(parameter: DTensor, value: Tensor) -> DTensor:
    first, rows = _first_row(parameter), len(parameter.to_local())
    return DTensor.from_local(
        value.detach()[first : first + rows].contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def _initialize(model: nn.Module, device: torch.device) -> None:
    """Give a model that was built on the meta device its initial values, one module at a time.

    Each module's reset_parameters() fills whole parameters and buffers on the CPU. Of the parameters this worker keeps
    its rows. The modules' order is that in which they are found in the model, so that the random numbers are those of a
    model that is built at once on the CPU.

    Raises:
        DataParallelError: a module has parameters or buffers, and no reset_parameters().
    """
    model.to_empty(device=device)
    done: set[int] = set()
    for name, module in model.named_modules():
        sharded = {key: value for key, value in parameters_of(module).items() if value is not None}
        buffers = {key: value for key, value in buffers_of(module).items() if value is not None}
        if not sharded and not buffers:
            continue
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise DataParallelError(
                f"replica.shard: module {name!r} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(), which would fill its parameters and buffers: add one, or build it on the CPU"
            )
        whole = {key: nn.Parameter(torch.empty(value.shape, dtype=value.dtype)) for key, value in sharded.items()}
        on_cpu = {key: value.cpu() for key, value in buffers.items()}
        _put(module, {**whole, **on_cpu})
        reset()
        for key, value in buffers.items():
            value.copy_(getattr(module, key))
        _put(module, {**sharded, **buffers})
        for key, value in sharded.items():
            if isinstance(value, DTensor) and id(value) not in done:
                value.to_local().copy_(_cut_like(value, whole[key]).to_local())
                done.add(id(value))


def _put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        setattr(module, name, tensor)


def _device_of(model: nn.Module, device: torch.device) -> torch.device:
    """Return the device of the model's parameters and buffers; `device` if they are on the meta device.

    Raises:
        DataParallelError: they are on several devices.
    """
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    if len(found) > 1:
        raise DataParallelError(
            f"replica.shard takes a model on one device, and this one is on {', '.join(sorted(map(str, found)))}: move "
            "it first, model.to(replica.device)"
        )
    return found.pop() if found else device
