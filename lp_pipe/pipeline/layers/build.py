"""Make the modules of one stage from what the model says, and count the parameters of all without keeping them."""

import contextlib
import copy
import gc
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.model import FromFunction, Layer, built_by_function
from lp_pipe.pipeline.layers.model_checks import refuse_inference, refuse_lazy
from lp_pipe.pipeline.layers.skips import Skip
from lp_pipe.pipeline.layers.wrapper import Wrapper
from lp_pipe.training.rng import layer_rng


def build_layers(sources: Sequence[Any], first_layer: int, seed: int, *, adopt: bool = False) -> list[nn.Module]:
    """The stage's own modules: ready-made ones are copied, parameters shared between them stay shared.

    adopt: ready-made modules are taken as they are.

    Raises:
        PipelineError: a factory returned something else than a module, one whose parameters have no shape, or one that
            was made under torch.inference_mode().
    """
    functions: dict[Callable[[], Any], list[nn.Module]] = {}
    layers: list[nn.Module] = []
    ready: list[int] = []
    for index, source in enumerate(sources, start=first_layer):
        if isinstance(source, Layer) or (isinstance(source, Wrapper) and not source.is_built):
            with layer_rng(seed, index):
                layer = _built(source)
        elif isinstance(source, FromFunction):
            if source.function not in functions:
                functions[source.function] = built_by_function(source.function, seed)
            layer = functions[source.function][source.index]
            if layer is source.module:  # the function gives the same modules each time: they are the user's
                ready.append(len(layers))
        else:
            layer = source
            ready.append(len(layers))
        layers.append(layer)
    if not adopt:
        for position, module in zip(ready, copied([layers[position] for position in ready]), strict=True):
            layers[position] = module
    for index, layer in enumerate(layers, start=first_layer):
        refuse_lazy(layer, f"layer {index}")
        refuse_inference(layer, f"layer {index}")
    return layers


def are_exclusive(sources: Sequence[Any]) -> bool:
    """Return whether only `sources` lead to their modules and tensors, so that no copy is needed to train them.

    Otherwise something beside the stage has them too (another stage of the worker, the loss, a hook) and must not see
    them change, as it does not in thread mode. References that are found from `sources` are compared with all others.
    """
    found: Counter[int] = Counter()
    alone = 0  # of which `reached` has the only reference; each other value has as many from this function
    reached: dict[int, Any] = {alone: object()}
    pending: list[Any] = [sources]
    while pending:
        for part in _referents(pending.pop()):
            found[id(part)] += 1
            if id(part) not in reached:
                reached[id(part)] = part
                pending.append(part)
    part = None
    counts = {key: sys.getrefcount(value) - found[key] for key, value in reached.items()}
    return all(counts[key] <= counts[alone] for key, value in reached.items() if isinstance(value, (nn.Module, Tensor)))


def _referents(value: Any) -> Sequence[Any]:
    """Return what deepcopy would look into; of a function, also what it captured."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ or ()
    if isinstance(value, (type, types.ModuleType, types.FrameType)):
        return ()
    return gc.get_referents(value)


def copied(modules: list[nn.Module]) -> list[nn.Module]:
    """What a module keeps of a forward (weight_norm's weight, the last attention) is copied without its graph.

    Sparse buffers are cloned: torch's deepcopy cannot copy the compressed layouts. Attributes of parameters come along,
    which torch's leaves out: optimizers are made by them (`_no_weight_decay`).
    """
    attributes = [value for layer in modules for module in layer.modules() for value in vars(module).values()]
    kept = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    kept += [b for layer in modules for b in layer.buffers() if b.layout is not torch.strided]
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in kept}
    copies = copy.deepcopy(modules, memo)
    for parameter in nn.ModuleList(modules).parameters():
        if id(parameter) in memo:  # a module may have a __deepcopy__ of its own
            vars(memo[id(parameter)]).update(copy.deepcopy(vars(parameter), memo))
    return copies


def parameter_count(source: Any) -> int:
    """Numbers in the parameters of a layer; a factory is run on the meta device, if it can be, to allocate nothing."""
    module = outlined(source)
    refuse_lazy(module, "a layer")
    return sum(parameter.numel() for parameter in module.parameters())


def outlined(source: Any) -> nn.Module:
    """The layer, to be looked at only: a factory's has no numbers in its parameters if that is possible."""
    module: Any = source.module if isinstance(source, FromFunction) else source
    is_built = module.is_built if isinstance(module, Wrapper) else isinstance(module, nn.Module)
    return module if is_built else _built_on_meta(module)


def _built(layer: Layer | Wrapper) -> nn.Module:
    module: Any = layer.build()
    if not isinstance(module, nn.Module):
        raise PipelineError(f"the factory of {layer!r} returned {module!r}, which is no nn.Module")
    if isinstance(layer, Layer) and isinstance(module, Skip):
        kind = f"pp.{type(module).__name__}({module.name!r}, "
        raise PipelineError(f"{layer!r} makes a {kind}…): write {kind}pp.Layer(…)), so that its name is known before")
    return module


def _built_on_meta(layer: Layer | Wrapper) -> nn.Module:
    with layer_rng(0, 0):  # so that the caller's random state stays as it is
        # It may look at values, as `linspace(...).tolist()` or numpy does. If that is not why it fails, it does so
        # again, and the first failure, which may be the meta device's, is not told with the second.
        with contextlib.suppress(Exception), torch.device("meta"):
            return _built(layer)
        return _built(layer)
