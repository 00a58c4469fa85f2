"""The loop in one process that every synchronous pipeline equals to the bit."""

from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.pipeline.build import build_layers
from lp_pipe.pipeline.microbatches import loss_weights, split
from lp_pipe.pipeline.model import Model, sources_of
from lp_pipe.pipeline.precision import autocast
from lp_pipe.pipeline.rng import step_rng
from lp_pipe.pipeline.skips import call, seen_by_setup
from lp_pipe.pipeline.tied import tie, tied_names


class PlainLoop:
    """Trains copies of a model's layers; knows no stages, schedules or channels."""

    def __init__(self, model: Model, microbatches: int, clip_grad_norm: float | None, precision: str = "fp32") -> None:
        sources = [seen_by_setup(source) for source in sources_of(model)]
        self._model = model
        self._microbatches = microbatches
        self._clip_grad_norm = clip_grad_norm
        self._precision = precision
        self._scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        self._layers = build_layers(sources, 0, model.seed)
        tie(self._layers, 0, tied_names(sources, model.tied), {}, model.seed)
        self._module = nn.Sequential(*self._layers)
        self._optimizer = model.optimizer(list(self._module.named_parameters()))
        self._lr_scheduler = model.lr_scheduler(self._optimizer) if model.lr_scheduler is not None else None
        self._step = 0

    def step(self, batch: tuple[Any, Any]) -> float:
        """One optimizer step; the weighted sum of the micro-batches' losses."""
        inputs, targets = (split(part, self._microbatches) for part in batch)
        total = 0.0
        pairs = zip(inputs, targets, loss_weights(targets, self._model.loss_weight), strict=True)
        for microbatch, (value, target, weight) in enumerate(pairs):
            with autocast(self._precision):
                result = self._model.loss(self._forward(value, microbatch), target)
            loss = result[0] if isinstance(result, tuple) else result
            total += loss.item() * weight
            self._scaler.scale(loss * weight).backward()
        self._scaler.unscale_(self._optimizer)
        if self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._module.parameters(), self._clip_grad_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()
        self._optimizer.zero_grad()
        self._step += 1
        return total

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._module.state_dict())

    def _forward(self, value: Any, microbatch: int) -> Any:
        stashed: dict[str, Any] = {}
        for index, layer in enumerate(self._layers):
            with step_rng(self._model.seed, index, self._step, microbatch):
                value = call(layer, (value,), stashed)
        return value
