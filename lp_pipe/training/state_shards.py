"""One rank's shards of an optimizer's parameters: it updates these, and has the optimizer state of these only (ZeRO).

A shard is a range of a parameter's elements, as they lie in memory. Its state has the shape of the shard. With offload
the state is in the host's memory, with a copy of the shard that the CPU updates:

    GPU     gradient ──┐                    ┌──> shard
    host               └──> update ── copy ─┘

Sources: ZeRO (Rajbhandari et al., 2020), section 5; ZeRO-Offload (Ren et al., 2021), section 4.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lp_pipe.errors import NotSupported
from lp_pipe.private_torch import version_of
from lp_pipe.training.device import empty_on_host
from lp_pipe.training.lasting_memory import lasting
from lp_pipe.training.optimizer_state import is_read_by_kernels, overrides_state_dict
from lp_pipe.training.tensor_parts import TensorPart, memory_order, part_of_range

_ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
_OF_WHOLE_PARAMETER = "step"  # torch's optimizers keep the number of updates under this name


def refuse_not_elementwise(optimizer: torch.optim.Optimizer, option: str) -> None:
    """Refuse an optimizer whose update of an element depends on other elements of the parameter.

    option: of the user, for the error, such as "zero=1".

    Raises:
        NotSupported: names the optimizer.
    """
    kind = type(optimizer)
    if not is_elementwise(optimizer):
        raise NotSupported(
            f"{option} with {kind.__name__}: each process updates a part of a parameter's elements, which is right for "
            "optimizers that treat every element independently, such as SGD, Adam, AdamW and RMSprop. If "
            f"{kind.__name__} does, set its class attribute `elementwise = True`; otherwise leave out {option}"
        )
    if overrides_state_dict(optimizer):
        raise NotSupported(f"{option} with {kind.__name__}, which has a state_dict() of its own: use zero=0")


def refuse_fused_on_cpu(optimizer: torch.optim.Optimizer, option: str, *, is_offloaded: bool = False) -> None:
    """Refuse a fused update of shards by the CPU, which would depend on where the shards begin.

    torch's kernel rounds the last elements of a tensor, which do not fill a vector of the processor, otherwise.

    Raises:
        NotSupported: names the optimizer.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and (is_offloaded or any(parameter.is_cpu for parameter in group["params"])):
            raise NotSupported(
                f"{option} with {type(optimizer).__name__}(fused=True) on the CPU: its results depend on how "
                f"parameters are divided: leave out fused=True, or {option}"
            )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is known to treat every element independently."""
    kind = type(optimizer)
    return bool(getattr(kind, "elementwise", kind in _ELEMENTWISE))


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as they lie in memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements lie in one piece of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class OwnShard:
    """The elements from `begin` on of a parameter. elements: one-dimensional, where the update is to be written."""

    elements: Tensor
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.elements.numel()


@dataclass(frozen=True)
class OwnShardState:
    """The optimizer's state of a shard: tensors of the shard's shape, and values for all of the parameter."""

    begin: int
    end: int
    values: Mapping[str, Any]

    def is_of_elements(self, name: str) -> bool:
        """Return whether a value has an entry for each element of the shard."""
        value = self.values[name]
        is_whole = name == _OF_WHOLE_PARAMETER
        return isinstance(value, Tensor) and not is_whole and tuple(value.shape) == (self.end - self.begin,)

    def parts(self, parameter: Tensor) -> dict[str, Any]:
        """Return the values, those of elements as parts of a tensor in the parameter's shape."""
        order = memory_order(parameter)
        return {
            name: part_of_range(value, parameter.shape, self.begin, order) if self.is_of_elements(name) else value
            for name, value in self.values.items()
        }


def joined(parameter: Tensor, parts: Sequence[OwnShardState]) -> dict[str, Any]:
    """Return the state of a whole parameter from those of its shards."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.values.items():
            if not part.is_of_elements(name):
                found.setdefault(name, value)
                continue
            if name not in found:
                found[name] = _empty_as(parameter, value)
            flat(found[name])[part.begin : part.end] = value
    return found


class _Trained(NamedTuple):
    """A shard, and the parameter that stands for it while the optimizer updates it: in its memory, or on the host."""

    shard: OwnShard
    stand_in: nn.Parameter


class StateShards:
    """An optimizer that updates shards in place of its parameters.

    Between steps its groups have the parameters, so that names, learning rates and schedulers are as without shards,
    and its `state` is empty. In a step its groups have the shards.

    shards: of each parameter of the optimizer that this rank has elements of. mirrors: those of another rank, which
        this one updates, too, so that they outlive that rank.
    is_offloaded: whether the CPU updates copies of the shards in the host's memory, which has the state, too. The bits
        are those of an optimizer whose parameters are on the CPU. A shard that something else has written to is copied
        again before the next update, if the tensor's version tells it; otherwise call `note_writes`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Mapping[nn.Parameter, OwnShard],
        mirrors: Mapping[nn.Parameter, OwnShard] | None = None,
        *,
        is_offloaded: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._is_offloaded = is_offloaded
        self._copied: dict[nn.Parameter, int] = {}  # by stand-in on the host: the version of the shard that it equals
        self._own: dict[nn.Parameter, _Trained] = {}
        self._mirrors: dict[nn.Parameter, _Trained] = {}
        self._state: dict[Any, Any] = defaultdict(dict)
        self._has_stepped = False
        self.set_shards(shards, mirrors or {})
        self.take_whole({parameter: state for parameter, state in optimizer.state.items() if state})
        optimizer.state.clear()

    def set_shards(
        self, shards: Mapping[nn.Parameter, OwnShard], mirrors: Mapping[nn.Parameter, OwnShard] | None = None
    ) -> None:
        """Update other shards from now on; they have no state yet."""
        self._own, self._mirrors = self._trained(shards), self._trained(mirrors or {})
        self._copied.clear()
        self._state.clear()

    def step(
        self, gradients: Mapping[nn.Parameter, Tensor], of_mirrors: Mapping[nn.Parameter, Tensor] | None = None
    ) -> None:
        """Update the shards. gradients: of the shards, by parameter; one without is left as it is."""
        try:
            for shards, found in ((self._own, gradients), (self._mirrors, of_mirrors or {})):
                for parameter, trained in shards.items():
                    gradient = found.get(parameter)
                    if gradient is not None and self._is_offloaded:
                        gradient = _on_host(gradient)
                    trained.stand_in.grad = gradient
            # The first update makes the optimizer's state.
            with (
                self._on_host_copies() if self._is_offloaded else contextlib.nullcontext(),
                contextlib.nullcontext() if self._has_stepped else lasting(),
                self._shards_in_groups(),
            ):
                self.optimizer.step()
            self._has_stepped = True
        finally:
            for trained in self._all():
                trained.stand_in.grad = None

    def states(self) -> dict[nn.Parameter, OwnShardState]:
        """Return the state of each own shard that has one, without copying it."""
        found = {parameter: self._state_of(trained) for parameter, trained in self._own.items()}
        return {parameter: state for parameter, state in found.items() if state.values}

    def held(self) -> dict[nn.Parameter, list[OwnShardState]]:
        """Return the state of own and mirrored shards, without copying it; a shard may have none yet."""
        found: dict[nn.Parameter, list[OwnShardState]] = {}
        for shards in (self._own, self._mirrors):
            for parameter, trained in shards.items():
                found.setdefault(parameter, []).append(self._state_of(trained))
        return found

    def take_whole(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Replace the state of shards and mirrors by that of whole parameters, which is copied."""
        self._state.clear()
        of_kernels = self._parameters_of_kernels()
        for shards in (self._own, self._mirrors):
            for parameter, trained in shards.items():
                if parameter in states:
                    whole = states[parameter]
                    own = {name: _cut(parameter, trained.shard, name, value) for name, value in whole.items()}
                    self._state[trained.stand_in] = _placed(trained, own, has_kernel=parameter in of_kernels)

    def set_states(
        self, states: Mapping[Any, Mapping[str, Any]], of_mirrors: Mapping[Any, Mapping[str, Any]] | None = None
    ) -> None:
        """Set the shards' state, from any device; values of their elements are one-dimensional.

        of_mirrors: None: there are none now.
        """
        self._state.clear()
        if of_mirrors is None:
            self._mirrors = {}
        of_kernels = self._parameters_of_kernels()
        for shards, given in ((self._own, states), (self._mirrors, of_mirrors or {})):
            for parameter in shards.keys() & given.keys():
                trained, has_kernel = shards[parameter], parameter in of_kernels
                self._state[trained.stand_in] = _placed(trained, given[parameter], has_kernel=has_kernel)

    def range_of(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return where this rank's shard of a parameter begins and ends; it may be empty."""
        trained = self._own.get(parameter)
        return (0, 0) if trained is None else (trained.shard.begin, trained.shard.end)

    def undoing(self) -> Callable[[], None]:
        """Return a function that brings the present state back."""
        kept = copy.deepcopy(list(self._state.values()))
        keys = list(self._state)

        def undo() -> None:
            self._state.clear()
            self._state.update(zip(keys, kept, strict=True))

        return undo

    def note_writes(self, *, to_shards: bool) -> None:
        """Note that parameters were written to. to_shards: maybe in the shards, so that the host's copies are old."""
        are_equal = self._is_offloaded and not to_shards
        self._copied = {one.stand_in: version_of(one.shard.elements) for one in self._all()} if are_equal else {}

    def _all(self) -> list[_Trained]:
        return [*self._own.values(), *self._mirrors.values()]

    def _trained(self, shards: Mapping[nn.Parameter, OwnShard]) -> dict[nn.Parameter, _Trained]:
        return {
            parameter: _Trained(
                shard, nn.Parameter(empty_on_host(shard.elements) if self._is_offloaded else shard.elements)
            )
            for parameter, shard in shards.items()
            if shard.elements.numel()
        }

    @contextlib.contextmanager
    def _on_host_copies(self) -> Iterator[None]:
        """Update the host's copies in the body; before, these become the shards, and after it the shards these."""
        with torch.no_grad():
            for shard, stand_in in self._all():
                if self._copied.get(stand_in) != version_of(shard.elements):
                    stand_in.copy_(shard.elements, non_blocking=True)
        for device in {shard.elements.device for shard, _ in self._all()}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        before = {trained.stand_in: version_of(trained.stand_in) for trained in self._all()}
        try:
            yield
        except BaseException:  # as if the shards themselves had been updated: the caller looks at their versions
            self._copy_to_shards([one for one in self._all() if version_of(one.stand_in) != before[one.stand_in]])
            self.note_writes(to_shards=True)
            raise
        self._copy_to_shards(self._all())  # of each version: some optimizers write to `.data`
        self.note_writes(to_shards=False)

    @torch.no_grad()
    def _copy_to_shards(self, updated: Sequence[_Trained]) -> None:
        for shard, stand_in in updated:
            shard.elements.copy_(stand_in, non_blocking=True)

    def _parameters_of_kernels(self) -> set[nn.Parameter]:
        return {one for group in self.optimizer.param_groups if is_read_by_kernels(group) for one in group["params"]}

    def _state_of(self, trained: _Trained) -> OwnShardState:
        return OwnShardState(trained.shard.begin, trained.shard.end, dict(self._state.get(trained.stand_in, {})))

    @contextlib.contextmanager
    def _shards_in_groups(self) -> Iterator[None]:
        groups = self.optimizer.param_groups
        whole, state = [group["params"] for group in groups], self.optimizer.state
        held = (self._own, self._mirrors)
        try:
            for group in groups:
                group["params"] = [shards[one].stand_in for one in group["params"] for shards in held if one in shards]
            self.optimizer.state = self._state  # type: ignore[assignment]  # torch's is a defaultdict, too
            yield
        finally:
            self.optimizer.state = state
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in the host's memory, which is complete once the GPU's current stream is."""
    return empty_on_host(tensor).copy_(tensor, non_blocking=True)


def _placed(trained: _Trained, state: Mapping[str, Any], *, has_kernel: bool) -> dict[str, Any]:
    """Return the state of a shard on the device that updates it. has_kernel: all values are read by a kernel."""
    described = OwnShardState(trained.shard.begin, trained.shard.end, state)
    found = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor) and (has_kernel or described.is_of_elements(name)):
            found[name] = value.to(trained.stand_in.device)
        elif isinstance(value, Tensor) and name == _OF_WHOLE_PARAMETER:
            found[name] = value.cpu()
    return found


def _cut(parameter: nn.Parameter, shard: OwnShard, name: str, value: Any) -> Any:
    """Return the shard's part of a value of the parameter's state."""
    if isinstance(value, TensorPart):  # of this very shard
        return value.flat(memory_order(parameter))
    if not isinstance(value, Tensor) or name == _OF_WHOLE_PARAMETER or value.shape != parameter.shape:
        return copy.deepcopy(value)
    if value.stride() != parameter.stride():
        value = _empty_as(parameter, value).copy_(value)
    return flat(value)[shard.begin : shard.end].clone()


def _empty_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Return memory for a value of each element of the parameter, which may be a DTensor."""
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
