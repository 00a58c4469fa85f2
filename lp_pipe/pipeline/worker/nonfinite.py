"""The search for the layer at which a step first met NaN or infinity: the micro-batches run once more.

A step without trouble needs no search: its loss and its gradients' norms are finite.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import NonFiniteError
from lp_pipe.pipeline.compute.recompute import is_recomputing
from lp_pipe.pipeline.compute.stage import LayerCall, Stage
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.pipeline.layers.microbatches import apart
from lp_pipe.pipeline.layers.skips import call
from lp_pipe.pipeline.results import NonFinite
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.worker.execution import Hook, Operation, RunAction
from lp_pipe.pipeline.worker.training import Training
from lp_pipe.training.gradients import is_finite

LOSS = "the loss function"
_AFTER = "earlier updates have been made: load() a checkpoint to go on"


class NonFiniteSearch(Hook):
    """Looks at every layer of the worker `node`'s stages. names: of the layers, by index."""

    def __init__(
        self, config: PipelineConfig, stages: Mapping[int, Stage], names: Mapping[int, str], node: str
    ) -> None:
        self._last_stage = config.last_stage
        self._stages = stages
        self.names = names
        self.node = node
        # For each micro-batch and stage of the last operation: the first layer in the forward, and in the backward.
        self.found: list[NonFinite] = []

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        self.found = []
        before = {stage: stage.watch for stage in self._stages.values()}
        for stage in before:
            stage.watch = partial(self._layer, stage)
        try:
            yield
        finally:
            for stage, watch in before.items():
                stage.watch = watch

    def _layer(self, stage: Stage, place: LayerCall, layer: nn.Module, value: Any, skips: dict[str, Any]) -> Any:
        """Call a layer and check its output; later, check the gradient of its input."""
        if is_recomputing():
            return call(layer, (value,), skips)
        name = self.names[place.layer]
        self._on_gradients(value, stage, place.microbatch, place.layer, f"layer {name}")
        inner: list[str] = []  # inner modules with an output that is not finite, as they ended
        with _hooked(layer, inner):
            value = call(layer, (value,), skips)
        if not is_finite(value):
            within = f", in its module {inner[0]!r}" if inner and inner[0] else ""
            self._note(False, stage, place.microbatch, place.layer, f"the output of layer {name}{within}")
        if stage.index == self._last_stage and place.layer == stage.last_layer:
            self._on_gradients(value, stage, place.microbatch, place.layer + 1, LOSS)
        return value

    def around(self, run: RunAction, action: Action, operation: Operation) -> None:
        run(action, operation)
        stage = self._stages[action.stage]
        if action.op != "F":
            found = self.bad_gradient(stage)
            if found is not None:
                self._note(True, stage, action.microbatch, *found)
        elif action.stage == self._last_stage and not is_finite(operation.losses[action.microbatch][0]):
            self._note(False, stage, action.microbatch, stage.last_layer + 1, f"the output of {LOSS}")

    def _on_gradients(self, value: Any, stage: Stage, microbatch: int, layer: int, of: str) -> None:
        def look(gradient: Tensor) -> None:
            if not is_finite(gradient):
                self._note(True, stage, microbatch, layer, f"the gradient of the input of {of}")

        for tensor in tensors_of(value):
            if tensor.requires_grad:
                tensor.register_hook(look)

    def bad_gradient(self, stage: Stage) -> tuple[int, str] | None:
        """Return the last layer of a stage with a gradient that is not finite, and which gradient that is."""
        for index, layer in reversed(list(enumerate(stage.layers, start=stage.first_layer))):
            for name, parameter in layer.named_parameters():
                if parameter.grad is not None and not is_finite(parameter.grad):
                    return index, f"the gradient of {name!r} of layer {self.names[index]}"
        return None

    def place(self, is_backward: bool, stage: Stage, microbatch: int, layer: int, what: str) -> NonFinite:
        """Return the place where something is not finite."""
        return NonFinite(is_backward, microbatch, layer, self.names.get(layer, LOSS), stage.index, self.node, what)

    def _note(self, is_backward: bool, stage: Stage, microbatch: int, layer: int, what: str) -> None:
        self.found.append(self.place(is_backward, stage, microbatch, layer, what))


class UpdateGuard(Hook):
    """Keeps NaN and infinity out of the updates of an asynchronous schedule (`on_nan="stop"`).

    A step cannot run again to find the layer: the weights have changed by then. So the stage checks its output before
    it sends it, and its gradients before it updates. Only a bad output makes the stage's layers run once more.
    """

    def __init__(self, stage: Stage, training: Training, search: NonFiniteSearch, config: PipelineConfig) -> None:
        self._stage = stage
        self._training = training
        self._search = search
        self._is_last = stage.index == config.last_stage
        self._input: Any = None

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        self._stage.watch = self._layer
        try:
            yield
        finally:
            self._stage.watch = None

    def around(self, run: RunAction, action: Action, operation: Operation) -> None:
        run(action, operation)
        if not self._is_last or action.op != "F":
            return
        loss = operation.losses[action.microbatch][0]
        if not is_finite(loss):
            layer, what = self._stage.last_layer + 1, f"the output of {LOSS}"
            self._fail(operation.step, f"the loss is {loss.item()}", False, action.microbatch, layer, what)

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
        with torch.no_grad(), self._search.operation():
            self._stage.run_again(value, place.step, place.microbatch)
        where = first(self._search.found)
        raise error_of(place.step, f"step {place.step}: an output is not finite", where, _AFTER)

    def _fail(self, step: int, what: str, is_backward: bool, microbatch: int, layer: int, where: str) -> None:
        place = self._search.place(is_backward, self._stage, microbatch, layer, where)
        raise error_of(step, f"step {step}: {what}", place, _AFTER)


def first(found: Iterable[NonFinite]) -> NonFinite | None:
    """Return where it began: the first layer in the lowest micro-batch's forward, else the last in its backward."""
    return min(found, key=_order, default=None)


def error_of(step: int, what: str, found: NonFinite | None, after: str) -> NonFiniteError:
    """Return an error that says what happened, where it began, and what the state is."""
    error = NonFiniteError(f"{described(what, found)}; {after}")
    error.step = step
    if found is not None:
        error.microbatch, error.stage, error.layer = found.microbatch, found.stage, found.layer_name
        error.order = _order(found)
    return error


def described(what: str, found: NonFinite | None) -> str:
    """Return what happened, and where it began."""
    if found is None:
        return f"{what}; but run again, no layer made such a number: a sum of finite numbers was too large"
    return f"{what}, first in micro-batch {found.microbatch}, stage {found.stage} ({found.node}): {found.what}"


@contextlib.contextmanager
def _hooked(layer: nn.Module, inner: list[str]) -> Iterator[None]:
    """Collect in `inner` the names of the layer's modules with an output that is not finite, while the body runs."""

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not is_finite(output):
            inner.append(name)

    hooks = [module.register_forward_hook(partial(after, name)) for name, module in layer.named_modules() if name]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _order(found: NonFinite) -> tuple[int, ...]:
    return int(found.is_backward), found.microbatch, -found.layer if found.is_backward else found.layer
