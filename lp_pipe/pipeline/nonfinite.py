"""Where a step first met NaN or infinity: its micro-batches run once more, and every layer is looked at.

Nothing of this runs in a step without trouble: whether there is any, the loss and the gradients' norms say.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.execution import Operation, Run
from lp_pipe.pipeline.message import tensors_of
from lp_pipe.pipeline.recompute import is_recomputing
from lp_pipe.pipeline.results import NonFinite
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.skips import call
from lp_pipe.pipeline.stage import Place, Stage

_LOSS = "the loss function"


class Search:
    """On the stages of the worker `node`. names: of their layers, by index."""

    def __init__(
        self, config: PipelineConfig, stages: Mapping[int, Stage], names: Mapping[int, str], node: str
    ) -> None:
        self._last_stage = config.last_stage
        self._stages = stages
        self._names = names
        self._node = node
        self._found: list[NonFinite] = []

    @contextlib.contextmanager
    def around(self, doing: Mapping[str, Run], found: list[NonFinite]) -> Iterator[Mapping[str, Run]]:
        """What to call for the actions of a step, instead of `doing`; afterwards `found` has what there was.

        Per micro-batch and stage: the first layer of the forward, and the last one, which is the backward's first.
        """
        self._found = []
        for stage in self._stages.values():
            stage.watch = partial(self._layer, stage)
        try:
            backwards = {op: partial(self._backward, doing[op]) for op in doing if op != "F"}
            yield {"F": partial(self._forward, doing["F"]), **backwards}
        finally:
            for stage in self._stages.values():
                stage.watch = None
            found += self._found

    def _layer(self, stage: Stage, place: Place, layer: nn.Module, value: Any, skips: dict[str, Any]) -> Any:
        """Call a layer, and look at what it makes; later, at the gradient that it hands to the one before."""
        if is_recomputing():
            return call(layer, (value,), skips)
        name = self._names[place.layer]
        self._on_gradients(value, stage, place.microbatch, place.layer, f"its input, in the backward of layer {name}")
        inner: list[str] = []  # modules of the layer whose output is not finite, in the order in which they ended
        with _hooked(layer, inner):
            value = call(layer, (value,), skips)
        if not is_finite(value):
            within = f", in its module {inner[0]!r}" if inner and inner[0] else ""
            self._note(False, stage, place.microbatch, place.layer, f"the output of layer {name}{within}")
        if stage.index == self._last_stage and place.layer == _last_layer(stage):
            self._on_gradients(value, stage, place.microbatch, place.layer + 1, f"the model's output, in {_LOSS}")
        return value

    def _forward(self, run: Run, action: Action, operation: Operation) -> None:
        run(action, operation)
        if action.stage == self._last_stage and not is_finite(operation.losses[action.microbatch][0]):
            stage = self._stages[action.stage]
            self._note(False, stage, action.microbatch, _last_layer(stage) + 1, f"the output of {_LOSS}")

    def _backward(self, run: Run, action: Action, operation: Operation) -> None:
        run(action, operation)
        stage = self._stages[action.stage]
        found = bad_gradient(stage)
        if found is not None:
            layer, parameter = found
            what = f"the gradient of {parameter!r} of layer {self._names[layer]}"
            self._note(True, stage, action.microbatch, layer, what)

    def _on_gradients(self, value: Any, stage: Stage, microbatch: int, layer: int, of: str) -> None:
        def look(gradient: Tensor) -> None:
            if not is_finite(gradient):
                self._note(True, stage, microbatch, layer, f"the gradient of {of}")

        for tensor in tensors_of(value):
            if tensor.requires_grad:
                tensor.register_hook(look)

    def _note(self, is_backward: bool, stage: Stage, microbatch: int, layer: int, what: str) -> None:
        name = self._names.get(layer, _LOSS)
        self._found.append(NonFinite(is_backward, microbatch, layer, name, stage.index, self._node, what))


def first(found: Iterable[NonFinite]) -> NonFinite | None:
    """Where it began: in the lowest micro-batch's forward at the first layer, else in its backward at the last one."""
    return min(found, key=lambda f: (f.is_backward, f.microbatch, -f.layer if f.is_backward else f.layer), default=None)


def is_finite(value: Any) -> bool:
    """Whether no tensor of a value holds NaN or infinity."""
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors_of(value) if _may_be_infinite(tensor))


def bad_gradient(stage: Stage) -> tuple[int, str] | None:
    """The last layer of a stage with a gradient that is not finite, and the parameter's name in it."""
    for index, layer in reversed(list(enumerate(stage.layers, start=stage.first_layer))):
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None and not is_finite(parameter.grad):
                return index, name
    return None


@contextlib.contextmanager
def _hooked(layer: nn.Module, inner: list[str]) -> Iterator[None]:
    """In the body, modules inside of the layer whose output is not finite leave their names."""

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not is_finite(output):
            inner.append(name)

    hooks = [module.register_forward_hook(partial(after, name)) for name, module in layer.named_modules() if name]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _last_layer(stage: Stage) -> int:
    return stage.first_layer + len(stage.layers) - 1


def _may_be_infinite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
