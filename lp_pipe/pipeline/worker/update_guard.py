"""A guard that keeps NaN and infinity out of the updates of an asynchronous schedule (`on_nan="stop"`).

A step cannot run again to find the layer: the weights have changed by then. So every stage checks its output before it
sends it, and its gradients before it updates. Only a bad output makes the stage's layers run once more.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lp_pipe.pipeline.compute.recompute import is_recomputing
from lp_pipe.pipeline.compute.stage import LayerCall, Stage
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers.microbatches import apart
from lp_pipe.pipeline.layers.skips import call
from lp_pipe.pipeline.results import NonFinite
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.worker.execution import Operation, RunAction
from lp_pipe.pipeline.worker.nonfinite import LOSS, NonFiniteSearch, error_of, first
from lp_pipe.pipeline.worker.training import Training
from lp_pipe.training.gradients import is_finite

_AFTER = "earlier updates have been made: load() a checkpoint to go on"


class UpdateGuard:
    """Checks the outputs and gradients of one stage."""

    def __init__(self, stage: Stage, training: Training, search: NonFiniteSearch, config: PipelineConfig) -> None:
        self._stage = stage
        self._training = training
        self._search = search
        self._is_last = stage.index == config.last_stage
        self._input: Any = None
        stage.watch = self._layer

    def around(self, doing: Mapping[str, RunAction]) -> Mapping[str, RunAction]:
        """Return what to call for actions in place of `doing`."""
        return {**doing, "F": partial(self._forward, doing["F"])} if self._is_last else doing

    def check_gradients(self, step: int, microbatch: int) -> None:
        """Check the gradients before an update, when the parameters that it changes are in their places.

        Raises:
            NonFiniteError: a gradient is not finite; names the layer.
        """
        if self._training.has_finite_gradients():
            return
        found = self._search.bad_gradient(self._stage)
        assert found is not None, "one of them is not finite"
        self._fail(step, "the gradients are not finite", True, microbatch, *found)

    def _layer(self, place: LayerCall, layer: nn.Module, value: Any, skips: dict[str, Any]) -> Any:
        if is_recomputing():
            return call(layer, (value,), skips)
        if place.layer == self._stage.first_layer:
            self._input = apart((value, value))[1]  # a layer may write to it
        made = call(layer, (value,), skips)
        if place.layer == self._stage.last_layer:
            value, self._input = self._input, None
            if not is_finite(made):
                self._fail_in_forward(place, value)
        return made

    def _fail_in_forward(self, place: LayerCall, value: Any) -> None:
        found: list[NonFinite] = []
        with torch.no_grad(), self._search.around({}, found):
            self._stage.run_again(value, place.step, place.microbatch)
        where = first(found)
        raise error_of(place.step, f"step {place.step}: an output is not finite", where, _AFTER)

    def _forward(self, run: RunAction, action: Action, operation: Operation) -> None:
        run(action, operation)
        loss = operation.losses[action.microbatch][0]
        if not is_finite(loss):
            layer, what = self._stage.last_layer + 1, f"the output of {LOSS}"
            self._fail(operation.step, f"the loss is {loss.item()}", False, action.microbatch, layer, what)

    def _fail(self, step: int, what: str, is_backward: bool, microbatch: int, layer: int, where: str) -> None:
        place = self._search.place(is_backward, self._stage, microbatch, layer, where)
        raise error_of(step, f"step {step}: {what}", place, _AFTER)
