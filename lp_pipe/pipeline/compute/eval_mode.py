"""Modules in eval mode, for an evaluation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """In the body; then every module has its own mode back (frozen ones may have been in eval mode before)."""
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
