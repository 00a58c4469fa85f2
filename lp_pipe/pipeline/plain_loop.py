"""The loop in one process to which every synchronous pipeline is equal to the bit."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.pipeline.compute.stage_loss import copy_loss
from lp_pipe.pipeline.layers.batch_dims import check_dims, marked, unmarked
from lp_pipe.pipeline.layers.build import build_layers
from lp_pipe.pipeline.layers.microbatches import apart, count, loss_weights, split
from lp_pipe.pipeline.layers.model import Model
from lp_pipe.pipeline.layers.named_layers import NamedLayers, model_names
from lp_pipe.pipeline.layers.optimizer_factories import make_optimizer, make_scheduler, wants_metric
from lp_pipe.pipeline.layers.skips import call, layer_sources
from lp_pipe.pipeline.layers.tied import tie, tied_names
from lp_pipe.pipeline.worker.module_settings import ModuleSettings, with_loss
from lp_pipe.private_torch import buffers_of, put_buffer
from lp_pipe.training.device import CPU, autocast, current, to_device, to_host
from lp_pipe.training.gradients import is_finite
from lp_pipe.training.rng import backward_place, optimizer_place, step_rng
from lp_pipe.training.write_tracker import WriteTracker


class PlainLoop:
    """A training loop over copies of a model's layers, without stages, schedules or channels.

    replicas_by_layer: gradients are summed in so many parts, micro-batch j in part j mod r; then the parts are summed,
        in order. Buffers written in a step belong to a part, too; after the step all have those of part 0.
    on_nan: "skip" leaves out the update of a step with a loss or gradient that is not finite, and what its forwards
        have written; only the learning rate advances.
    """

    def __init__(
        self,
        model: Model,
        microbatches: int,
        clip_grad_norm: float | None,
        precision: str,
        replicas_by_layer: Sequence[int],
        device: torch.device = CPU,
        on_nan: str = "ignore",
    ) -> None:
        sources = layer_sources(model)
        self._model = model
        self._device = device
        self._loss = copy_loss(model.loss, device)
        self._microbatches = microbatches
        self._clip_grad_norm = clip_grad_norm
        self._precision = precision
        self._on_nan = on_nan
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        with current(device):
            self._layers = build_layers(sources, 0, model.seed)
        tied = tied_names(sources, model.tied)
        tie(self._layers, 0, tied, {}, model.seed)
        for layer in self._layers:
            layer.to(device)
        self._named = NamedLayers(self._layers)
        named_parameters = dict(self._named.named_parameters())
        self._parameters = model_names(sources, tied).whole_of_parameters([named_parameters])
        self._optimizer = make_optimizer(model.optimizer, list(self._parameters.items()))
        self._lr_scheduler = make_scheduler(model.lr_scheduler, self._optimizer) if model.lr_scheduler else None
        self._step = 0
        # A parameter or module that several layers share counts as the first one's.
        self._replicas: dict[int, int] = {}  # by the parameter's id
        self._modules: dict[nn.Module, int] = {}  # modules with buffers
        for layer, replicas in zip(self._layers, replicas_by_layer, strict=True):
            for parameter in layer.parameters():
                self._replicas.setdefault(id(parameter), replicas)
            self._note_modules(layer, replicas)
        self._buffers: dict[tuple[nn.Module, int], dict[str, Tensor | None]] = {}  # of replicas after the first
        self._last_replicas = replicas_by_layer[-1]
        if isinstance(self._loss, nn.Module):
            self._note_modules(self._loss, self._last_replicas)
        self._parts: dict[str, dict[int, Tensor]] = {}
        with_buffers = self._modules if on_nan == "skip" else ()
        self._settings = ModuleSettings(with_loss(self._named.named_modules(), self._loss))
        self._writes = WriteTracker(self._named.modules(), self._parameters.items(), with_buffers)

    def step(self, batch: tuple[Any, Any]) -> float:
        """Take one optimizer step; return the weighted sum of the micro-batches' losses."""
        input_dims, target_dims, _ = check_dims(self._model.batch_dims)
        batch = marked(batch[0], input_dims), marked(batch[1], target_dims)
        count(batch, self._microbatches)  # refuses tensors of different samples
        value, target = apart(batch)
        inputs = split(to_device(value, self._device), self._microbatches)
        targets = split(target, self._microbatches)
        weights = loss_weights(targets, self._model.loss_weight)
        with current(self._device):
            self._settings.apply_due(self._model.callbacks, self._step)
            targets = to_device(targets, self._device)
            return self._stepped([*map(unmarked, inputs)], [*map(unmarked, targets)], weights)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state_dict of the trained copies, in the host's memory."""
        return dict(to_host(self._named.state_dict(), self._device))

    def _stepped(self, inputs: list[Any], targets: list[Any], weights: list[float]) -> float:
        losses = [0.0] * self._last_replicas
        self._writes.begin(self._step, trains=True)
        self._copy_buffers()
        for microbatch, (value, target, weight) in enumerate(zip(inputs, targets, weights, strict=True)):
            with self._buffers_for(microbatch):
                with autocast(self._precision, self._device.type):
                    output = self._forward(value, microbatch)
                    with step_rng(self._model.seed, len(self._layers), self._step, microbatch):
                        result = self._loss(output, target)
                loss = result[0] if isinstance(result, tuple) else result
                losses[microbatch % self._last_replicas] += loss.item() * weight
                with step_rng(self._model.seed, 0, self._step, backward_place(microbatch)):
                    self._scaler.scale(loss * weight).backward()
            self._set_aside(microbatch)
        self._writes.end(trains=True)
        self._sum_parts()
        self._scaler.unscale_(self._optimizer)
        loss = sum(losses[1:], losses[0])
        if self._on_nan == "skip" and not self._is_finite(loss):
            self._writes.undo(self._step)
        else:
            self._update()
        self._scaler.update()
        if self._lr_scheduler is not None and not wants_metric(self._lr_scheduler):
            self._lr_scheduler.step()
        for parameter in self._parameters.values():  # also parameters that the optimizer does not have
            parameter.grad = None
        self._step += 1
        return loss

    def _is_finite(self, loss: float) -> bool:
        """Return whether loss and gradients are finite; the scaler checks gradients that are scaled."""
        gradients = [parameter.grad for parameter in self._parameters.values()] if not self._scaler.is_enabled() else []
        return math.isfinite(loss) and all(gradient is None or is_finite(gradient) for gradient in gradients)

    def _update(self) -> None:
        if self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_grad_norm)
        with step_rng(self._model.seed, optimizer_place(0), self._step, 0):
            self._scaler.step(self._optimizer)

    def _note_modules(self, layer: nn.Module, replicas: int) -> None:
        for module in layer.modules():
            if buffers_of(module):
                self._modules.setdefault(module, replicas)

    def _copy_buffers(self) -> None:
        """Copy the buffers for every replica after the first: all replicas begin a step with the same ones."""
        self._buffers = {
            (module, replica): {name: b.clone() if b is not None else None for name, b in buffers_of(module).items()}
            for module, replicas in self._modules.items()
            for replica in range(1, replicas)
        }

    @contextmanager
    def _buffers_for(self, microbatch: int) -> Iterator[None]:
        """Give the modules the buffers of the replica that runs the micro-batch, in the body."""
        turns = {module: microbatch % replicas for module, replicas in self._modules.items()}
        places = [(module, replica) for module, replica in turns.items() if replica]
        firsts = [dict(buffers_of(module)) for module, _ in places]
        for module, replica in places:
            _put_buffers(module, self._buffers[module, replica])
        yield
        for (module, replica), first in zip(places, firsts, strict=True):
            self._buffers[module, replica] = dict(buffers_of(module))
            _put_buffers(module, first)

    def _set_aside(self, microbatch: int) -> None:
        """Let the next micro-batch add to its replica's sum of gradients."""
        for name, parameter in self._parameters.items():
            replicas = self._replicas[id(parameter)]
            if replicas > 1:
                parts = self._parts.setdefault(name, {})
                if parameter.grad is not None:
                    parts[microbatch % replicas] = parameter.grad
                parameter.grad = parts.get((microbatch + 1) % replicas)

    def _sum_parts(self) -> None:
        for name, parts in self._parts.items():
            in_order = [parts[replica] for replica in sorted(parts)]
            self._parameters[name].grad = sum(in_order[1:], in_order[0]) if in_order else None
        self._parts.clear()

    def _forward(self, value: Any, microbatch: int) -> Any:
        stashed: dict[str, Any] = {}
        for index, layer in enumerate(self._layers):
            with step_rng(self._model.seed, index, self._step, microbatch):
                value = call(layer, (value,), stashed)
        return value


def _put_buffers(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    for name, buffer in buffers.items():
        put_buffer(module, name, buffer)
