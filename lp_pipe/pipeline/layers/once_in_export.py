"""What torch.export writes down once, although forward has it anew in each call: other draws, and what it counts."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from lp_pipe.errors import PipelineError

_OF_MODULES = {*vars(nn.Module()), "forward", "_orig_forward"}


@contextmanager
def once_refused(module: nn.Module) -> Iterator[None]:
    """The body traces `module`, whose graph will have the numbers that forward finds now, for ever.

    torch.export puts attributes back when it is done, so they are looked at where forward ends.

    Raises:
        PipelineError: forward draws from Python's or numpy's generator, or changes a number or a flag of a module's.
    """
    before, draws = _numbers(module), _draws()
    changed: list[str] = []

    def look(*_: Any) -> None:
        after = _numbers(module)
        changed.extend(name for name, value in before.items() if name in after and after[name] != value)

    handle = module.register_forward_hook(look)
    try:
        yield
    finally:
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


def _refusal(module: nn.Module, why: str) -> PipelineError:
    return PipelineError(f"{type(module).__name__} cannot be split: {why}, or write the layers by hand")


def _draws() -> dict[str, Any]:
    state: Any = np.random.get_state()
    return {"Python's random": random.getstate(), "numpy.random": (state[1].tobytes(), *state[2:])}


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
