"""Checks of ready-made modules for what the copies that stages train would lose."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.model import Model
from lp_pipe.pipeline.layers.overlaps import address_of, overlapping
from lp_pipe.private_torch import buffers_of, hooks_of, is_batch_norm, parameters_of


def refuse_lazy_layers(model: Model, sources: Sequence[Any]) -> None:
    """Refuse ready-made layers with a parameter that has no shape yet.

    Raises:
        PipelineError: the error names the parameter.
    """
    for index, source in _ready_made(sources):
        refuse_lazy(source, f"layer {index}")


def refuse_trained_loss(model: Model, sources: Sequence[Any]) -> None:
    """Refuse a loss with parameters.

    Raises:
        PipelineError: no stage would train them.
    """
    loss = model.loss
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise PipelineError(
            f"the loss, {type(loss).__name__}, has parameters, which no stage would train: put them into the model's "
            "last layer, or give them requires_grad_(False)"
        )


def _ready_made(sources: Sequence[Any]) -> list[tuple[int, nn.Module]]:
    return [(index, source) for index, source in enumerate(sources) if isinstance(source, nn.Module)]


def refuse_time_first(sources: Sequence[Any], first_layer: int = 0) -> None:
    """Refuse modules that by torch's default take their samples along dimension 1.

    Raises:
        PipelineError: the model would cut its batches in time, because it does not give batch_dims.
    """
    for index, source in enumerate(sources, start=first_layer):
        for name, module in source.named_modules() if isinstance(source, nn.Module) else ():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
                where = f"layer {index}" + (f" ({name})" if name else "")
                raise PipelineError(
                    f"{where}, {type(module).__name__}, has batch_first=False, so batches of (time, batch, …) would "
                    "be cut in time: if the model takes these, give pp.Model(batch_dims=1); if forward changes the "
                    "order itself, give batch_dims=0"
                )


def refuse_lazy(module: nn.Module, what: str) -> None:
    """Refuse a module with a parameter without a shape, which torch would learn from the first input.

    Raises:
        PipelineError: the error names the parameter.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise PipelineError(
                f"{what}, {type(module).__name__}, has a parameter without a shape ({name}), so no stage could make "
                "its optimizer: give the sizes, or call the whole model once with an example before"
            )


def refuse_inference(module: nn.Module, what: str) -> None:
    """Refuse a module with a tensor that was made under torch.inference_mode().

    Raises:
        PipelineError: the error names the parameter or buffer.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_inference():
            raise PipelineError(
                f"{what}, {type(module).__name__}, has a tensor ({name}) that was made under torch.inference_mode(), "
                "which autograd cannot use: make the layer outside of it, or under torch.no_grad()"
            )


def refuse_hooks(model: Model, sources: Sequence[Any]) -> None:
    """Refuse ready-made layers with hooks of parameters.

    Raises:
        PipelineError: the stage's copy would not have the hook.
    """
    named = [(index, *item) for index, source in _ready_made(sources) for item in source.named_parameters()]
    for index, name, parameter in named:
        if hooks_of(parameter, "backward", "post_accumulate_grad"):
            raise PipelineError(
                f"parameter {name!r} of layer {index} has a hook, which the stage's copy would not have: make the "
                "layer with pp.Layer and register the hook there, so that it runs where the layer is trained"
            )


def refuse_scripted(model: Model, sources: Sequence[Any]) -> None:
    """Refuse ready-made layers that TorchScript has made.

    Raises:
        PipelineError: torch makes no copies of them that can be trained.
    """
    for index, source in _ready_made(sources):
        scripted = [part for part in source.modules() if isinstance(part, torch.jit.ScriptModule)]
        if any(parameter.requires_grad for part in scripted for parameter in part.parameters()):
            raise PipelineError(
                f"layer {index} has a scripted module, of which torch makes no copies that can be trained: make it "
                "with pp.Layer, as pp.Layer(lambda: torch.jit.script(Block()))"
            )


def views(sources: Sequence[Any]) -> dict[str, str]:
    """Return the names of buffers in ready-made layers that are views of others, each with the error for a write to it.

    A copy in another process has memory of its own for each tensor. That is right for constants (slices of one table of
    rotary angles), but a write to one tensor does not change the other.

    Raises:
        PipelineError: a buffer is a view of a parameter or of a BatchNorm's statistics, which training writes to.
    """
    named: dict[int, tuple[str, Tensor]] = {}  # an object under two names is one entry
    written: set[int] = set()  # addresses
    for index, source in enumerate(sources):
        for place, module in source.named_modules(prefix=str(index)) if isinstance(source, nn.Module) else ():
            for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
                if tensor is not None and (address := address_of(tensor)):
                    named.setdefault(id(tensor), (f"{place}.{name}", tensor))
                    if isinstance(tensor, nn.Parameter) or is_batch_norm(module):
                        written.add(address)
    tensors = list(named.values())
    found: dict[str, str] = {}
    for position in overlapping([tensor for _, tensor in tensors]):
        name, tensor = tensors[position]
        if isinstance(tensor, nn.Parameter):
            continue
        layer, path = name.split(".", 1)
        found[name] = (
            f"buffer {path!r} of layer {layer} shares memory with another buffer or a parameter (one is a view of the "
            "other), but the stage's copies do not: a write to one in training would not show in the other. Register "
            "a clone(), or make the layer that has both with pp.Layer"
        )
        if address_of(tensor) in written:
            raise PipelineError(found[name])
    return found
