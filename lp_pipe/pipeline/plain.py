"""The loop in one process that every synchronous pipeline equals to the bit."""

from typing import Any

from torch import Tensor, nn

from lp_pipe.pipeline.build import build_layers
from lp_pipe.pipeline.microbatches import loss_weights, split
from lp_pipe.pipeline.model import Model, sources_of
from lp_pipe.pipeline.rng import step_rng
from lp_pipe.pipeline.skips import call, seen_by_setup
from lp_pipe.pipeline.stage import Stage
from lp_pipe.pipeline.tied import tie, tied_names


class PlainLoop:
    """Trains copies of a model's layers; knows no stages, schedules or channels."""

    def __init__(self, model: Model, microbatches: int, clip_grad_norm: float | None) -> None:
        sources = [seen_by_setup(source) for source in sources_of(model)]
        self._model = model
        self._microbatches = microbatches
        self._clip_grad_norm = clip_grad_norm
        self._layers = build_layers(sources, 0, model.seed)
        tie(self._layers, 0, tied_names(sources, model.tied), {}, model.seed)
        self._stage = Stage(0, 0, self._layers, model.seed)  # asked for names only
        self._parameters = dict(self._stage.named_parameters())
        self._optimizer = model.optimizer(list(self._parameters.items()))
        self._lr_scheduler = model.lr_scheduler(self._optimizer) if model.lr_scheduler is not None else None
        self._step = 0

    def step(self, batch: tuple[Any, Any]) -> float:
        """One optimizer step; the weighted sum of the micro-batches' losses."""
        inputs, targets = (split(part, self._microbatches) for part in batch)
        total = 0.0
        pairs = zip(inputs, targets, loss_weights(targets, self._model.loss_weight), strict=True)
        for microbatch, (value, target, weight) in enumerate(pairs):
            result = self._model.loss(self._forward(value, microbatch), target)
            loss = result[0] if isinstance(result, tuple) else result
            total += loss.item() * weight
            (loss * weight).backward()
        if self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_grad_norm)
        self._optimizer.step()
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()
        self._optimizer.zero_grad()
        self._step += 1
        return total

    def state_dict(self) -> dict[str, Tensor]:
        return self._stage.state_dict()

    def _forward(self, value: Any, microbatch: int) -> Any:
        stashed: dict[str, Any] = {}
        for index, layer in enumerate(self._layers):
            with step_rng(self._model.seed, index, self._step, microbatch):
                value = call(layer, (value,), stashed)
        return value
