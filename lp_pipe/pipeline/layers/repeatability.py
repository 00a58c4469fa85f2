"""Whether a forward computes the same in a second call, which is all that a graph of it can do.

What it keeps in attributes (a list of hidden states, a generator of its own, a dict that counts) the graph has as it
was at the split, in every call. Neither the graph nor the attributes tell: many a module keeps there what it never
reads again, such as its attention, for plots.
"""

import contextlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.build import copied
from lp_pipe.private_torch import buffers_of, put_buffer, pytree
from lp_pipe.training.rng import step_rng

_OF_MODULES = {*vars(nn.Module()), "forward"}


@contextmanager
def once_refused(module: nn.Module) -> Iterator[None]:
    """The body traces `module`, whose graph will have the numbers that forward finds now, for ever.

    torch.export puts attributes back when it is done, so they are looked at where forward ends.

    Raises:
        PipelineError: forward draws from Python's or numpy's generator, changes a number or a flag of a module's, or
            gives a submodule another buffer.
    """
    before, draws = _numbers(module), _draws()
    changed: list[str] = []
    buffers: dict[str, Tensor | None] = {}
    replaced: list[str] = []

    def begin(*_: Any) -> None:
        buffers.update(_buffers(module))  # those that it is traced with

    def look(*_: Any) -> None:
        after = _numbers(module)
        changed.extend(name for name, value in before.items() if name in after and after[name] != value)
        others = [name for name, buffer in _buffers(module).items() if buffer is not buffers.get(name)]
        # Of the module's own, which have no dot in their names, torch.export writes it down, if there was one.
        replaced.extend(name for name in others if "." in name or buffers.get(name) is None)

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(look)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for name, now in _draws().items():
        if draws[name] != now:
            raise _refusal(
                module,
                f"forward draws from {name}, and torch.export would write down this one draw, for all steps: draw by "
                "torch (torch.rand), leave it out (such as SpecAugment, in the configuration)",
            )
    if changed:
        raise _refusal(
            module,
            f"forward changes {changed[0]!r}, which torch.export would write down as it is now, for all steps: "
            "make it a buffer (a tensor) that forward writes to; if only the first call changes it, make one before",
        )
    if replaced:
        raise _refusal(
            module,
            f"forward gives another tensor in the place of buffer {replaced[0]!r}, which torch.export would not write "
            "down: let the constructor register it in its shape, and forward write to it in place (copy_)",
        )


def _refusal(module: nn.Module, why: str) -> PipelineError:
    return PipelineError(f"{type(module).__name__} cannot be split: {why}, or write the layers by hand")


def _draws() -> dict[str, Any]:
    state: Any = np.random.get_state()
    return {"Python's random": random.getstate(), "numpy.random": (state[1].tobytes(), *state[2:])}


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """By their names, also those that are still None."""
    named = module.named_modules(remove_duplicate=False)
    return {f"{prefix}.{name}".lstrip("."): b for prefix, part in named for name, b in buffers_of(part).items()}


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Attributes that are plain numbers, in train mode also flags; a size that may change is none (a SymInt).

    RWKV has a flag that follows `training`, and so changes in eval mode.
    """
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _OF_MODULES and (type(value) in (int, float) or (part.training and type(value) is bool))
    }


_SAMPLES = 2  # of the example, which may be large
_Example = tuple[tuple[Any, ...], dict[str, Any]]


def is_same_again(module: nn.Module, example: _Example) -> bool:
    """Call a copy of the module twice, with the same parameters, buffers and draws; in the mode that it is in.

    True also where that cannot be told.
    """
    tensors = [*module.parameters(), *module.buffers(), *_tensors_in(example)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return True  # a meta device computes nothing, and kernels of GPUs may add in any order
    # An example may be of the right sizes only, with words that there are not; and a module may have no copies.
    with contextlib.suppress(Exception):
        (twin,) = copied([module])
        buffers = [(inner, dict(buffers_of(inner))) for inner in twin.modules()]
        values = [(buffer, buffer.clone()) for buffer in twin.buffers()]
        first = _results(twin, example)
        for inner, present in buffers:
            for name, buffer in present.items():
                put_buffer(inner, name, buffer)
        for tensor, value in [*values, *zip(twin.parameters(), module.parameters(), strict=True)]:
            tensor.data.copy_(value)
        again = _results(twin, example)
        return len(first) == len(again) and all(map(_are_close, first, again))
    return True


def refusal(module: nn.Module) -> PipelineError:
    """Where it is not."""
    return PipelineError(
        f"{type(module).__name__} cannot be split: forward computes something else when it is called again with the "
        "same input, by what it keeps beside parameters and buffers (an attribute, a list, a generator of its own), "
        "and torch.export would write down its first call, for all steps: make it a buffer that forward writes to, "
        "draw by torch (torch.rand), or write the layers by hand"
    )


def _results(module: nn.Module, example: _Example) -> list[Tensor]:
    """What it returns, and what it has written to buffers."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: (tensor[:_SAMPLES] if tensor.dim() else tensor).detach().clone(), example
    )
    with torch.no_grad(), step_rng(0, 0, 0, 0), _others_as_before():
        output = module(*args, **kwargs)
    return [tensor.clone() for tensor in [*_tensors_in(output), *module.buffers()]]


@contextmanager
def _others_as_before() -> Iterator[None]:
    """Who draws from these is told so where it is traced."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _are_close(first: Tensor, second: Tensor) -> bool:
    """As threads leave them, which may add in any order."""
    one, other = (x.to_dense() if x.layout is not torch.strided else x for x in (first, second))
    if one.dtype == other.dtype and torch.equal(one, other):
        return True  # before any wide copies: the logits of a long text may be a large part of the memory
    one, other = one.to(torch.complex128), other.to(torch.complex128)
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
