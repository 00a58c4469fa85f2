"""What torch.export writes down once, although forward has it anew in each call: other draws, counts, new buffers."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import buffers_of

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
