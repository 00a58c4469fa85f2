"""What ready-made modules may have that would be lost on the way to the stages, which train copies of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.overlaps import address_of, overlapping
from lp_pipe.private_torch import buffers_of, hooks_of, is_batch_norm, parameters_of


def check_model(loss: Any, sources: Sequence[Any]) -> None:
    """Look at a model before anything is made of it.

    Raises:
        PipelineError: a parameter has hooks, which copies do not have, or no shape yet, or is TorchScript's; or the
            loss has parameters, which no stage would train.
    """
    for index, source in enumerate(sources):
        if isinstance(source, nn.Module):
            refuse_lazy(source, f"layer {index}")
            _refuse_hooks(source, index)
            _refuse_scripted(source, index)
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise PipelineError(
            f"the loss, {type(loss).__name__}, has parameters, which nobody would train: make what they belong to the "
            "model's last layer, or give them requires_grad_(False)"
        )


def refuse_time_first(sources: Sequence[Any], first_layer: int = 0) -> None:
    """Refuse modules that by torch's default take their samples along dimension 1: the model must say where they are.

    Raises:
        PipelineError: the batch would be cut in time.
    """
    for index, source in enumerate(sources, start=first_layer):
        for name, module in source.named_modules() if isinstance(source, nn.Module) else ():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
                where = f"layer {index}" + (f" ({name})" if name else "")
                raise PipelineError(
                    f"{where}, {type(module).__name__}, has batch_first=False: if the model takes (time, batch, …), "
                    "say pp.Model(batch_dims=1), else its batches would be cut in time; if forward changes the order "
                    "itself, say batch_dims=0"
                )


def refuse_lazy(module: nn.Module, what: str) -> None:
    """
    Raises:
        PipelineError: it has a parameter whose shape torch would learn from the first input.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise PipelineError(
                f"{what}, {type(module).__name__}, has a parameter without a shape ({name}), so that no stage could "
                "make its optimizer: write the sizes, or call the whole model once with an example before"
            )


def refuse_inference(module: nn.Module, what: str) -> None:
    """
    Raises:
        PipelineError: it has a parameter or buffer that was made under torch.inference_mode().
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_inference():
            raise PipelineError(
                f"{what}, {type(module).__name__}, has a tensor ({name}) that was made under torch.inference_mode(), "
                "which autograd cannot use: make the layer outside of that, or under torch.no_grad()"
            )


def _refuse_hooks(module: nn.Module, index: int) -> None:
    for name, parameter in module.named_parameters():
        if hooks_of(parameter, "backward", "post_accumulate_grad"):
            raise PipelineError(
                f"parameter {name!r} of layer {index} has a hook, which the stage's copy would not have: let a "
                "pp.Layer make the layer and register the hook there, so that it runs where the layer is trained"
            )


def _refuse_scripted(module: nn.Module, index: int) -> None:
    scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    if any(parameter.requires_grad for part in scripted for parameter in part.parameters()):
        raise PipelineError(
            f"layer {index} has a scripted module, of which torch makes no copies that can be trained: let a pp.Layer "
            "make it, as pp.Layer(lambda: torch.jit.script(Block()))"
        )


def views(sources: Sequence[Any]) -> dict[str, str]:
    """The names of buffers in ready-made layers that are views of others, each with what to say if one writes to it.

    A copy that travels to a process has memory of its own for each tensor, which is right for constants (slices of one
    table of rotary angles): what is written to one stays there.

    Raises:
        PipelineError: a view of a parameter or of a BatchNorm's statistics, which training writes to.
    """
    named: dict[int, tuple[str, Tensor]] = {}  # one object under two names is one here
    written: set[int] = set()  # memory
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
            f"buffer {path!r} of layer {layer} shares memory with another one, or with a parameter (one is a view of "
            "the other), which the stage's copies would not: what training writes to one would not be seen in the "
            "other. Register a clone(), or let a pp.Layer make the layer that has both, where it is trained"
        )
        if address_of(tensor) in written:
            raise PipelineError(found[name])
    return found
