"""Rounds of training in which layers are measured, each as a stage of its own."""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.flop_counter import FlopCounterMode

from lp_pipe.channels.packing import copied
from lp_pipe.pipeline.compute.activation_meter import ActivationMeter, memory_of
from lp_pipe.pipeline.compute.stage import LayerCall, Stage
from lp_pipe.pipeline.layers.build import build_layers
from lp_pipe.pipeline.layers.message import Message, tensors_of, to_message
from lp_pipe.pipeline.layers.model import Loss
from lp_pipe.pipeline.layers.skips import call, popped_by
from lp_pipe.pipeline.layers.tied import Names, tie
from lp_pipe.private_torch import DispatchMode, address_of_storage
from lp_pipe.training.device import to_device

# The memory of layers: what their forwards leave for their backwards, and the peak of what they make.
#
# The stashes are counted so that consecutive layers' bytes add up:
#
#     Linear -> Tanh -> Linear     Tanh keeps its output, and the second Linear the same tensor: it counts for Tanh


class LayerStash:
    """The stash of one layer, while the graph of that forward lives.

    The layer's stage calls this in the layer's place (`Stage.watch`).
    batch: tensors that the layer may keep and that are in memory anyway.
    """

    def __init__(self, layer: nn.Module, batch: Any) -> None:
        self.meter = ActivationMeter()
        self.meter.leave_out([*layer.parameters(), *layer.buffers(), *tensors_of(batch)])
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, place: LayerCall, layer: nn.Module, value: Any, skips: dict[str, Any]) -> Any:
        with self.meter.counting():
            made = call(layer, (value,), skips)
        self._inputs, self._outputs = tensors_of(value), tensors_of(made)
        return made

    def counted(self, wanted: Iterable[int]) -> tuple[int, set[int]]:
        """Return the bytes without its inputs', and which of those it keeps.

        wanted: the outputs that the next layer keeps.
        """
        kept = {place for place, tensor in enumerate(self._inputs) if self.meter.holds(tensor)}
        own = self.meter.bytes - _storage_bytes(self._inputs[place] for place in kept)
        places = {_address(tensor): place for place, tensor in enumerate(self._inputs)}
        passed_on = [self._outputs[place] for place in wanted if not self.meter.holds(self._outputs[place])]
        made = [tensor for tensor in passed_on if _address(tensor) not in places]
        # Views of an input, and what was written in place, count for the layer that made the memory.
        return own + _storage_bytes(made), kept | {places[at] for at in map(_address, passed_on) if at in places}


def stash_bytes(stashes: Sequence[LayerStash]) -> list[int]:
    """Return the bytes of all layers of a model, in order, without what the first keeps of the batch."""
    found: list[int] = []
    wanted: set[int] = set()
    for stash in reversed(stashes):
        own, wanted = stash.counted(wanted)
        found.append(own)
    return found[::-1]


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors; memory that some of them share counts once."""
    return sum({_address(tensor): memory_of(tensor)[1] for tensor in tensors}.values())


def _address(tensor: Tensor) -> int:
    return memory_of(tensor)[0]


class PeakMeter(DispatchMode):  # type: ignore[misc]
    """A meter of the memory of tensors that are made in its body, as long as each of them lives.

    peak_bytes: the most at a time. The body may be entered again.
    Tensors that share memory count once, and those from before not at all. What a kernel needs only while it runs
    is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, Any] = {}  # weak references to storages, by address

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count what it makes; torch calls this in the place of each operation."""
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            self._see(tensor.untyped_storage(), 0)  # a storage from before the body counts nothing
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._see(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return made

    def _see(self, storage: UntypedStorage, size: int) -> None:
        address = address_of_storage(storage)
        if address in self._alive:
            return
        self._alive[address] = weakref.ref(storage, lambda _: self._forget(address, size))
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _forget(self, address: int, size: int) -> None:
        self._alive.pop(address, None)
        self.bytes -= size


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors that have one storage, which sparse ones do not."""
    return [tensor for tensor in tensors_of(value) if tensor.layout is torch.strided]


class FlopMeter:
    """A counter of the floating-point operations in its body, each time that it is entered."""

    def __init__(self) -> None:
        self._counter: FlopCounterMode | None = None
        self.counts: list[int] = []

    def __enter__(self) -> None:
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()

    def __exit__(self, *error: Any) -> None:
        assert self._counter is not None, "it was entered"
        self._counter.__exit__(*error)
        self.counts.append(self._counter.get_total_flops())


_WARMUPS = 2
_MICROBATCH = 0


@dataclass(frozen=True)
class Work:
    """The layers that setup has seen, and one micro-batch for them, which are measured. Picklable."""

    sources: Sequence[Any]
    tied: Sequence[Names]
    loss: Loss
    seed: int
    batch: tuple[Any, Any]
    device: str
    precision: str = "fp32"

    def rounds(self) -> "LayerRounds":
        """Return rounds of new copies of the layers."""
        layers = build_layers(self.sources, 0, self.seed)
        tie(layers, 0, self.tied, {}, self.seed)
        place = torch.device(self.device)
        return LayerRounds(layers, self.loss, self.seed, to_device(self.batch, place), place, self.precision)


@dataclass
class Measured:
    """The seconds of each round of one layer, and its bytes."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    backward_input: list[float] = field(default_factory=list)
    backward_weight: list[float] = field(default_factory=list)
    activation_bytes: int = 0
    meter: PeakMeter | FlopMeter | None = None  # only in the rounds of peak_bytes and flops, which take longer


class LayerRounds:
    """Forwards and backwards of one micro-batch through stages of one layer each."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: Loss,
        seed: int,
        batch: Any,
        device: torch.device,
        precision: str = "fp32",
    ) -> None:
        self._loss = loss
        self._input, self._target = batch
        self._device = device
        self.layers = layers
        self._stages = [
            Stage(i, i, [layer], seed, precision=precision, device=device) for i, layer in enumerate(layers)
        ]
        self._step = 0
        self._stashed_by: dict[str, int] = {}
        self.skips: list[tuple[int, int]] = []  # from the layer of a Stash to that of its Pop
        self.measured = [Measured() for _ in layers]

    def warm_up(self) -> None:
        """Run rounds without counting their times; sizes are the same in each."""
        for _ in range(_WARMUPS):
            self.run()
        self.measured = [Measured(activation_bytes=taken.activation_bytes) for taken in self.measured]

    def peak_bytes(self) -> list[int]:
        """Return the peak of each layer, from a round of its own, and forget the times."""
        meters = [PeakMeter() for _ in self._stages]
        self.measured = [Measured(meter=meter) for meter in meters]
        self._run(split=False)
        return [meter.peak_bytes for meter in meters]

    def flops(self) -> list[tuple[int, int]]:
        """Return the operations of each layer's forward and backward, from a round of its own, and forget the times."""
        meters = [FlopMeter() for _ in self._stages]
        self.measured = [Measured(meter=meter) for meter in meters]
        self._run(split=False)
        return [(sum(meter.counts[:-1]), meter.counts[-1]) for meter in meters]  # the loss counts for the last layer

    def kept_bytes(self) -> list[tuple[float, float]]:
        """Return what each layer leaves for its backward, and its output, from one forward."""
        return [(kept, taken.activation_bytes) for kept, taken in zip(self.stash_bytes(), self.measured, strict=True)]

    def stash_bytes(self) -> list[int]:
        """Return what each layer leaves for its backward, from one more forward, and forget the times."""
        self.measured = [Measured() for _ in self._stages]
        stashes = [LayerStash(layer, (self._input, self._target)) for layer in self.layers]
        for stage, stash in zip(self._stages, stashes, strict=True):
            stage.watch = stash
        output = self._forwards()
        with stashes[-1].meter.counting():
            loss = self._loss(output, self._target)
        found = stash_bytes(stashes)
        del loss  # it holds the last layer's graph
        for stage in self._stages:
            stage.watch = None
            stage.discard()
        self._step += 1
        return found

    def run(self) -> None:
        """Run both kinds of backward, each after a forward of its own."""
        self._run(split=False)
        self._run(split=True)

    def _run(self, *, split: bool) -> None:
        """Run forward and backward once.

        split: whether the backwards run in their two parts.
        """
        output = self._forwards()
        seconds, loss = self._timed(self.measured[-1], self._loss, output, self._target)
        self.measured[-1].forward[-1] += seconds
        self._backwards(loss[0] if isinstance(loss, tuple) else loss, split)
        self._step += 1

    def _forwards(self) -> Any:
        message = self._apart(Message(self._input, (False,) * len(tensors_of(self._input))))
        waiting: dict[str, Message] = {}
        output: Any = None
        for index, (stage, taken) in enumerate(zip(self._stages, self.measured, strict=True)):
            skips: dict[str, Any] = {name: waiting.pop(name) for name in popped_by(stage.layers)}
            if not self._step:
                self.skips += [(self._stashed_by[name], index) for name in skips]
            seconds, output = self._timed(taken, stage.forward, message, self._step, _MICROBATCH, skips)
            taken.forward.append(seconds)
            taken.activation_bytes = sum(_bytes(value) for value in (output, *skips.values()))
            self._stashed_by.update(dict.fromkeys(skips, index))
            waiting.update({name: self._apart(to_message(value)) for name, value in skips.items()})
            message = self._apart(to_message(output))
        return output

    def _backwards(self, loss: Tensor, split: bool) -> None:
        gradients: list[Tensor | None] = []
        popped: dict[str, list[Tensor | None]] = {}
        for stage, taken in zip(reversed(self._stages), reversed(self.measured), strict=True):
            stash = stage.activation_stash[_MICROBATCH]
            skips = [root for name in stash.stashed for root in zip(stash.stashed[name], popped[name], strict=True)]
            if stage is self._stages[-1]:
                work = partial(stage.backward_from_loss, _MICROBATCH, loss, defer_weights=split)
            else:
                work = partial(stage.backward, _MICROBATCH, gradients, skips, defer_weights=split)
            seconds, gradients = self._timed(taken, work)
            (taken.backward_input if split else taken.backward).append(seconds)
            if split:
                seconds, _ = self._timed(taken, stage.backward_weights, _MICROBATCH)
                taken.backward_weight.append(seconds)
            for name in stash.popped_gradients:
                popped[name] = stage.take_popped_gradients(_MICROBATCH, name)

    def _timed(self, taken: Measured, work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        self._wait()
        started = time.perf_counter()
        with taken.meter or nullcontext():
            made = work(*arguments)
        self._wait()
        return time.perf_counter() - started, made

    def _apart(self, message: Message) -> Message:
        """Return the message with memory of its own, as if it had been sent: a stage may write to its input."""
        return message._replace(value=copied(message.value))

    def _wait(self) -> None:
        """Wait until the device has done what it was asked to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value))
