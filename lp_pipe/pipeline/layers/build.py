"""Build the modules of one stage from the model's description, and count parameters without keeping them."""

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


def build_layers(
    sources: Sequence[Any],
    first_layer: int,
    seed: int,
    *,
    adopt: bool = False,
    on_built: Callable[[nn.Module], None] = lambda _: None,
) -> list[nn.Module]:
    """Return the stage's own modules: ready-made ones are copied, and parameters shared between them stay shared.

    adopt: take ready-made modules as they are. on_built: called with each layer that a factory has made.

    Raises:
        PipelineError: a factory returned something else than a module, a module with a parameter without a shape, or
            one that was made under torch.inference_mode().
    """
    functions: dict[Callable[[], Any], list[nn.Module]] = {}
    layers: list[nn.Module] = []
    ready: list[int] = []
    for index, source in enumerate(sources, start=first_layer):
        if isinstance(source, Layer) or (isinstance(source, Wrapper) and not source.is_built):
            with layer_rng(seed, index):
                layer = _built(source)
            on_built(layer)
        elif isinstance(source, FromFunction):
            if source.function not in functions:
                functions[source.function] = built_by_function(source.function, seed)
            layer = functions[source.function][source.index]
            if layer is source.module:  # the function returns the same modules each time: they are the user's
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
    """Return whether only `sources` refer to their modules and tensors, so that no copy is needed to train them.

    Otherwise something else refers to them too (another stage of the worker, the loss, a hook) and must not see them
    change, as it does not in thread mode. References found from `sources` are compared with all others.
    """
    found: Counter[int] = Counter()
    alone = 0  # an object to which only `reached` refers: the others have as many references from this function
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
    """Return what deepcopy would look into; for a function, also its captured variables."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ or ()
    if isinstance(value, (type, types.ModuleType, types.FrameType)):
        return ()
    return gc.get_referents(value)


def copied(modules: list[nn.Module]) -> list[nn.Module]:
    """Return copies of the modules.

    What a module keeps of a forward (weight_norm's weight, the last attention) is copied without its graph. Sparse
    buffers are cloned: torch's deepcopy cannot copy the compressed layouts. Attributes of parameters are copied too,
    which torch leaves out: some optimizers read them (`_no_weight_decay`).
    """
    attributes = [value for layer in modules for module in layer.modules() for value in vars(module).values()]
    kept = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    kept += [b for layer in modules for b in layer.buffers() if b.layout is not torch.strided]
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in kept}
    copies = copy.deepcopy(modules, memo)
    for parameter in nn.ModuleList(modules).parameters():
        if id(parameter) in memo:  # not in memo if a module has its own __deepcopy__
            vars(memo[id(parameter)]).update(copy.deepcopy(vars(parameter), memo))
    return copies


def parameter_count(source: Any) -> int:
    """Return how many numbers a layer's parameters have.

    A factory runs on the meta device if it can, to allocate nothing.
    """
    module = outlined(source)
    refuse_lazy(module, "a layer")
    return sum(parameter.numel() for parameter in module.parameters())


def outlined(source: Any) -> nn.Module:
    """Return the layer as a module to look at; if possible, that of a factory has no numbers in its parameters."""
    module: Any = source.module if isinstance(source, FromFunction) else source
    is_built = module.is_built if isinstance(module, Wrapper) else isinstance(module, nn.Module)
    return module if is_built else _built_on_meta(module)


def _built(layer: Layer | Wrapper) -> nn.Module:
    module: Any = layer.build()
    if not isinstance(module, nn.Module):
        raise PipelineError(f"the factory of {layer!r} returned {module!r}, which is no nn.Module")
    if isinstance(layer, Layer) and isinstance(module, Skip):
        kind = f"pp.{type(module).__name__}({module.name!r}, "
        raise PipelineError(
            f"{layer!r} makes a {kind}…): write {kind}pp.Layer(…)), so that the name is known before the stage builds "
            "it"
        )
    return module


def _built_on_meta(layer: Layer | Wrapper) -> nn.Module:
    with layer_rng(0, 0):  # leaves the caller's random state as it is
        # The factory may look at values, as `linspace(...).tolist()` or numpy does, which fails on the meta device. If
        # that is not the reason, it fails again, and only the second error is raised.
        with contextlib.suppress(Exception), torch.device("meta"):
            return _built(layer)
        return _built(layer)
