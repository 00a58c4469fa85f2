"""Make the modules of one stage from what the model says, and count the parameters of all without keeping them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.model import FromFunction, Layer, built_by_function
from lp_pipe.pipeline.rng import layer_rng


def build_layers(sources: Sequence[Any], first_layer: int, seed: int) -> list[nn.Module]:
    """The stage's own modules: ready-made ones are copied, parameters shared between them stay shared.

    Raises:
        PipelineError: a factory returned something else than a module.
    """
    functions: dict[Callable[[], Any], list[nn.Module]] = {}
    layers: list[nn.Module] = []
    ready: list[int] = []
    for index, source in enumerate(sources, start=first_layer):
        if isinstance(source, Layer):
            with layer_rng(seed, index):
                layer = source.build()
        elif isinstance(source, FromFunction):
            if source.function not in functions:
                functions[source.function] = built_by_function(source.function, seed)
            layer = functions[source.function][source.index]
            if layer is source.module:  # the function gives the same modules each time: they are the user's
                ready.append(len(layers))
        else:
            layer = source
            ready.append(len(layers))
        if not isinstance(layer, nn.Module):
            raise PipelineError(f"the factory of layer {index} ({source!r}) returned {layer!r}, which is no nn.Module")
        layers.append(layer)
    copies = copy.deepcopy([layers[position] for position in ready])
    for position, module in zip(ready, copies, strict=True):
        layers[position] = module
    return layers


def parameter_count(source: Any) -> int:
    """Numbers in the parameters of a layer; a factory is run on the meta device, if it can be, to allocate nothing."""
    module: Any = source.module if isinstance(source, FromFunction) else source
    if isinstance(module, Layer):
        module = _built_for_counting(module)
    return sum(parameter.numel() for parameter in module.parameters())


def _built_for_counting(layer: Layer) -> nn.Module:
    with layer_rng(0, 0):  # so that the caller's random state stays as it is
        try:
            with torch.device("meta"):
                return layer.build()
        except (NotImplementedError, RuntimeError):  # it looks at values, such as `linspace(...).tolist()`
            return layer.build()


def refuse_ties_across(sources: Sequence[Any], cuts: Sequence[int]) -> None:
    """Raise when two stages would train copies of one parameter, which then drift apart.

    Raises:
        PipelineError: names both layers and says how to cut instead.
    """
    owners: dict[int, int] = {}
    for index, source in enumerate(sources):
        module = source.module if isinstance(source, FromFunction) else source
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            first = owners.setdefault(id(parameter), index)
            if any(first < cut <= index for cut in cuts):
                raise PipelineError(
                    f"layers {first} and {index} share a parameter but are in different stages (cuts {list(cuts)}): "
                    f"choose cut points that leave layers {first} to {index} in one stage"
                )
