"""Measure what the layers of a model take, each as a stage of its own, on one device."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.build import build_layers
from lp_pipe.pipeline.device import computing_with, copied_on, to_device
from lp_pipe.pipeline.layer_names import layer_names
from lp_pipe.pipeline.message import Message, tensors_of, to_message
from lp_pipe.pipeline.model import Loss, Model, sources_of
from lp_pipe.pipeline.partitioning import LayerProfile, Profile
from lp_pipe.pipeline.peak_memory import PeakMeter
from lp_pipe.pipeline.skips import popped_by, seen_by_setup
from lp_pipe.pipeline.stage import Stage
from lp_pipe.pipeline.tied import Names, tie, tied_names
from lp_pipe.resources import Resources

_WARMUPS = 2
_LEAST_ROUNDS = 5
_MOST_ROUNDS = 50
_SECONDS = 2.0  # for all rounds together, once there are enough for a median
_MICROBATCH = 0


def profile(model: Model, sample_input: Any, sample_target: Any, *, device: str = "cpu") -> Profile:
    """Train copies of the model's layers on the sample, one micro-batch, for some seconds after a warm-up.

    On a CPU one thread computes, as in a stage that has not asked for more. The loss counts as part of the last layer.
    A backward is timed as a whole, and its part for the parameters is that of a split backward. A value that a Stash
    sets aside counts with its layer's output, and passes all boundaries up to its Pop.

    Raises:
        PipelineError: the model cannot be built.
    """
    if not isinstance(model, Model):
        raise PipelineError(f"profile takes a pp.Model(layers, loss, optimizer), not {type(model).__name__}")
    sources = [seen_by_setup(source) for source in sources_of(model)]
    tied = tied_names(sources, model.tied)
    return profile_layers(sources, tied, model.loss, model.seed, (sample_input, sample_target), device)


def profile_layers(
    sources: Sequence[Any], tied: Sequence[Names], loss: Loss, seed: int, batch: tuple[Any, Any], device: str
) -> Profile:
    """As `profile`, of the layers that setup has seen."""
    layers = build_layers(sources, 0, seed)
    tie(layers, 0, tied, {}, seed)
    place = torch.device(device)
    batch = to_device(batch, place)
    with computing_with(Resources().threads):
        rounds = _Rounds(layers, loss, seed, batch, place)
        for _ in range(_WARMUPS):
            rounds.run(split=False)
            rounds.run(split=True)
        rounds.forget_times()
        started = time.perf_counter()
        for count in range(_MOST_ROUNDS):
            if count >= _LEAST_ROUNDS and time.perf_counter() - started > _SECONDS:
                break
            rounds.run(split=False)
            rounds.run(split=True)
        measured = rounds.measured
        peaks = rounds.peak_bytes()
    names = layer_names(sources)
    layers_measured = zip(names, measured, peaks, layers, strict=True)
    edges = [(index, index + 1) for index in range(len(layers) - 1)] + rounds.skips
    return Profile(
        tuple(_layer_profile(*parts) for parts in layers_measured),
        tuple((names[source], names[reader]) for source, reader in edges) if rounds.skips else None,
    )


@dataclass
class _Measured:
    """Of one layer: seconds of each round."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    backward_input: list[float] = field(default_factory=list)
    backward_weight: list[float] = field(default_factory=list)
    activation_bytes: int = 0
    meter: PeakMeter | None = None  # in the round that is for it, which takes longer


class _Rounds:
    """Forwards and backwards of one micro-batch through stages of one layer each."""

    def __init__(self, layers: Sequence[nn.Module], loss: Loss, seed: int, batch: Any, device: torch.device) -> None:
        self._loss = loss
        self._input, self._target = batch
        self._device = device
        self._stages = [Stage(i, i, [layer], seed, device=device) for i, layer in enumerate(layers)]
        self._step = 0
        self._stashed_by: dict[str, int] = {}
        self.skips: list[tuple[int, int]] = []  # from the layer of a Stash to that of its Pop
        self.measured = [_Measured() for _ in layers]

    def forget_times(self) -> None:
        """Of the warm-up; sizes are the same in each round."""
        self.measured = [_Measured(activation_bytes=taken.activation_bytes) for taken in self.measured]

    def peak_bytes(self) -> list[int]:
        """Of each layer, in a round of its own; forgets the times."""
        meters = [PeakMeter() for _ in self._stages]
        self.measured = [_Measured(meter=meter) for meter in meters]
        self.run(split=False)
        return [meter.peak_bytes for meter in meters]

    def run(self, *, split: bool) -> None:
        """Forward and backward once. split: the backwards in their two parts."""
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

    def _timed(self, taken: _Measured, work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        self._wait()
        started = time.perf_counter()
        with taken.meter or nullcontext():
            made = work(*arguments)
        self._wait()
        return time.perf_counter() - started, made

    def _apart(self, message: Message) -> Message:
        """With memory of its own, as if it had been sent: a stage may write to its input."""
        return Message(copied_on(message.value, self._device), message.wants_gradient)

    def _wait(self) -> None:
        """Until the device has done what it was asked to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _layer_profile(name: str, taken: _Measured, peak_bytes: int, layer: nn.Module) -> LayerProfile:
    backward, weight = median(taken.backward), median(taken.backward_weight)
    parts = median(taken.backward_input) + weight
    return LayerProfile(
        name,
        forward_s=median(taken.forward),
        backward_s=backward,
        activation_bytes=taken.activation_bytes,
        parameter_bytes=sum(parameter.nbytes for parameter in layer.parameters()),
        # Parts take longer than a whole backward does: their shares of it count.
        backward_weight_s=backward * weight / parts if parts else 0.0,
        forward_spread_s=_spread(taken.forward),
        backward_spread_s=_spread(taken.backward),
        peak_bytes=peak_bytes,
    )


def _spread(seconds: Sequence[float]) -> float:
    """Between the first and the third quarter."""
    first, _, third = quantiles(seconds, n=4)
    return third - first


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value))
