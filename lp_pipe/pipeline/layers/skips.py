"""Values that skip layers: `Stash` sets one aside, a later `Pop` takes it, over any number of stages.

    U-Net:  Stash("a", down) -> Stash("b", down) -> bottom -> Pop("b", up) -> Pop("a", up)

In a pipeline a value has a channel of its own, straight from stage to stage. Source: torchgpipe's @skippable.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.cuts import stage_of
from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.pipeline.layers.model import FromFunction, Layer, Model, sources_of
from lp_pipe.pipeline.layers.wrapper import Wrapper
from lp_pipe.pipeline.schedule.channels import ScheduleEdge
from lp_pipe.private_torch import pytree


class Skip(Wrapper):
    """A layer with a name for its skip. A layer may have two: `Pop("a", Stash("b", layer))` calls `layer(x, a)`."""

    def __init__(self, name: str, layer: Any) -> None:
        super().__init__(layer)
        self.name = name

    def around(self, layer: Any) -> Self:
        return type(self)(self.name, layer)


class Stash(Skip):
    """`layer(x) -> (y, value)`: y goes to the next layer, value waits for the Pop of this name.

    The value stays as it was here, even if later layers write to y in place. If it is y, its gradient is added to the
    gradient that the layers behind found for y, as one term, in a pipeline as in one process.
    """

    def forward(self, *inputs: Any) -> tuple[Any, Any]:
        return self.outputs(self.layer(*inputs))

    def outputs(self, made: Any) -> tuple[Any, Any]:
        """Return what the layer has made, as (y, value).

        Raises:
            PipelineError: it is no pair.
        """
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise PipelineError(f"the layer of Stash({self.name!r}) must return (y, value), not {type(made).__name__}")
        output, value = made
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(output)}
        return output, pytree.tree_map_only(Tensor, lambda tensor: _apart(tensor, memory), value)


class Pop(Skip):
    """`layer(x, value)` is called with the value that the Stash of this name has set aside."""

    def forward(self, *inputs: Any) -> Any:
        return self.layer(*inputs)


class Sequential(nn.Sequential):
    """nn.Sequential for layers with Stash and Pop among them: the whole model in one process."""

    calls_in_order = True  # allows it as a model's layers, although it overrides forward

    def __init__(self, layers: Sequence[nn.Module] | Mapping[str, nn.Module]) -> None:
        super().__init__(*(layers.values() if isinstance(layers, Mapping) else layers))

    def forward(self, value: Any) -> Any:
        stashed: dict[str, Any] = {}
        for layer in self:
            value = call(layer, (value,), stashed)
        return value


def call(layer: nn.Module, inputs: tuple[Any, ...], stashed: dict[str, Any]) -> Any:
    """Return a layer's output; Stash and Pop put values into `stashed`, and take them out.

    Raises:
        PipelineError: a Pop finds no value.
    """
    if isinstance(layer, Stash):
        output, stashed[layer.name] = layer.outputs(call(layer.layer, inputs, stashed))
        return output
    if isinstance(layer, Pop):
        if layer.name not in stashed:
            raise PipelineError(
                f"Pop({layer.name!r}): no layer before it has stashed this value: add pp.Stash({layer.name!r}, …)"
            )
        return call(layer.layer, (*inputs, stashed.pop(layer.name)), stashed)
    return layer(*inputs)


def layer_sources(model: Model) -> list[Any]:
    """Return `sources_of` the model, with each Stash or Pop itself in place of its factory: setup must know its name.

    Raises:
        PipelineError: as `sources_of`.
    """
    return [_seen_by_setup(source) for source in sources_of(model)]


def popped_by(layers: Sequence[Any]) -> list[str]:
    """Return the names of the values that the layers take."""
    return [skip.name for layer in layers for skip in _skips_of(layer) if isinstance(skip, Pop)]


def skip_edges(sources: Sequence[Any], cuts: Sequence[int]) -> list[ScheduleEdge]:
    """Return the channels of the values that pass from stage to stage, and of their gradients.

    Raises:
        PipelineError: a value is stashed or popped twice, never, or in the wrong order.
    """
    ends: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        for skip in _skips_of(source.module if isinstance(source, FromFunction) else source):
            _check_turn(skip, index, ends.setdefault(skip.name, []))
            ends[skip.name].append(stage_of(index, cuts))
    for name, stages in ends.items():
        if len(stages) < 2:
            raise PipelineError(f"Stash({name!r}) is never popped: add pp.Pop({name!r}, …) behind it")
    crossing = [(name, first, last) for name, (first, last) in ends.items() if first != last]
    values = [ScheduleEdge("value", first, last, (name,)) for name, first, last in crossing]
    return values + [ScheduleEdge("value gradient", last, first, (name,)) for name, first, last in crossing]


def _seen_by_setup(source: Any) -> Any:
    is_skip = isinstance(source, Layer) and isinstance(source.factory, type) and issubclass(source.factory, Skip)
    return source.build() if is_skip else source


def _check_turn(skip: Skip, index: int, ends: list[int]) -> None:
    what = f"layer {index}, {type(skip).__name__}({skip.name!r})"
    if isinstance(skip, Pop) and not ends:
        raise PipelineError(f"{what}: no layer before it stashes this value: add pp.Stash({skip.name!r}, …) before it")
    if isinstance(skip, Stash) and ends:
        raise PipelineError(f"{what}: this name is stashed already: give each value its own name")
    if len(ends) > 1:
        raise PipelineError(f"{what}: the value is popped already: stash it again under another name")


def _skips_of(layer: Any) -> list[Skip]:
    """Return a layer's skips in the order in which they act: Pops before the layer, Stashes after it."""
    skips: list[Skip] = []
    while isinstance(layer, Skip):
        skips.append(layer)
        layer = layer.layer
    for module in layer.modules() if isinstance(layer, nn.Module) else ():
        if isinstance(module, Skip):
            raise PipelineError(f"{type(module).__name__}({module.name!r}) is inside another module: make it a layer")
    return sorted(skips, key=lambda skip: isinstance(skip, Stash))


def _apart(tensor: Tensor, memory: set[int]) -> Tensor:
    """Return the tensor as a node of its own in the graph, in its own memory if a later layer could write to it."""
    return tensor.clone() if tensor.untyped_storage().data_ptr() in memory else tensor.view_as(tensor)
