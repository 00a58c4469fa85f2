"""Checks that a forward computes the same in each call, which is all that an exported graph of it can do.

torch.export writes down once what forward does anew in each call: draws from other generators, counts, new buffers. The
graph also has attributes (a list of hidden states, a generator, a dict that counts) as they were at the split, in every
call. Neither the graph nor the attributes show whether that matters, since many modules keep values that they never
read again, such as attention for plots. So the forward is called twice.
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
def unrepeatable_refused(module: nn.Module) -> Iterator[None]:
    """Trace `module` in the body, and refuse what its graph would repeat in all calls.

    torch.export restores attributes when it is done, so they are compared where forward ends.

    Raises:
        PipelineError: forward draws from Python's or numpy's generator, changes a number or a flag of a module's, or
            gives a submodule another buffer.
    """
    before, draws = _numbers(module), _draws()
    changed: list[str] = []
    buffers: dict[str, Tensor | None] = {}
    replaced: list[str] = []

    def begin(*_: Any) -> None:
        buffers.update(_buffers(module))  # the buffers that it is traced with

    def look(*_: Any) -> None:
        after = _numbers(module)
        changed.extend(name for name, value in before.items() if name in after and after[name] != value)
        others = [name for name, buffer in _buffers(module).items() if buffer is not buffers.get(name)]
        # torch.export writes down a replaced buffer of the module itself (no dot in its name), if there was one before.
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
                f"forward draws from {name}, and torch.export would write down this one draw, for all steps: draw "
                "with torch (torch.rand), or switch it off (such as SpecAugment, in the configuration)",
            )
    if changed:
        raise _refusal(
            module,
            f"forward changes {changed[0]!r}, which torch.export would write down as it is now, for all steps: make "
            "it a buffer (a tensor) that forward writes to; if only the first call changes it, call forward once "
            "before",
        )
    if replaced:
        raise _refusal(
            module,
            f"forward replaces buffer {replaced[0]!r} by another tensor, which torch.export would not write down: "
            "register it in its shape in the constructor, and let forward write to it in place (copy_)",
        )


def _refusal(module: nn.Module, why: str) -> PipelineError:
    return PipelineError(f"{type(module).__name__} cannot be split: {why}, or write the layers by hand")


def _draws() -> dict[str, Any]:
    state: Any = np.random.get_state()
    return {"Python's random": random.getstate(), "numpy.random": (state[1].tobytes(), *state[2:])}


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return all buffers by name, also those that are None."""
    named = module.named_modules(remove_duplicate=False)
    return {f"{prefix}.{name}".lstrip("."): b for prefix, part in named for name, b in buffers_of(part).items()}


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return attributes that are plain numbers, and in train mode also flags.

    A size that may change is none (a SymInt). Flags count in train mode only: RWKV has one that follows `training`.
    """
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _OF_MODULES and (type(value) in (int, float) or (part.training and type(value) is bool))
    }


_SAMPLES = 2  # samples of the example, which may be large
_Example = tuple[tuple[Any, ...], dict[str, Any]]


def is_same_again(module: nn.Module, example: _Example) -> bool:
    """Return whether two calls of a copy of the module, with the same parameters, buffers and draws, return the same.

    The mode is the one that the module is in. True also if that cannot be found out.
    """
    tensors = [*module.parameters(), *module.buffers(), *_tensors_in(example)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return True  # a meta device computes nothing, and GPU kernels may sum in any order
    # An example may have the right sizes but impossible words, and a module may not allow copies.
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
    """Return the error for a module that is not the same again."""
    return PipelineError(
        f"{type(module).__name__} cannot be split: forward computes something else when it is called again with the "
        "same input, because of state beside parameters and buffers (an attribute, a list, a generator), and "
        "torch.export would write down its first call, for all steps: make it a buffer that forward writes to, draw "
        "with torch (torch.rand), or write the layers by hand"
    )


def _results(module: nn.Module, example: _Example) -> list[Tensor]:
    """Return what the module returns, and its buffers after the call."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: (tensor[:_SAMPLES] if tensor.dim() else tensor).detach().clone(), example
    )
    with torch.no_grad(), step_rng(0, 0, 0, 0), _others_as_before():
        output = module(*args, **kwargs)
    return [tensor.clone() for tensor in [*_tensors_in(output), *module.buffers()]]


@contextmanager
def _others_as_before() -> Iterator[None]:
    """Restore the generators of Python and numpy after the body; `unrepeatable_refused` reports draws from them."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _are_close(first: Tensor, second: Tensor) -> bool:
    """Return whether two results are equal but for the order in which threads sum."""
    one, other = (x.to_dense() if x.layout is not torch.strided else x for x in (first, second))
    if one.dtype == other.dtype and torch.equal(one, other):
        return True  # before making wide copies: the logits of a long text may take much of the memory
    one, other = one.to(torch.complex128), other.to(torch.complex128)
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
