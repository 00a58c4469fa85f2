"""The blocks that a module repeats, such as the layers of a transformer: `split_points="auto"` cuts before them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

_LEAST_SHARE = 0.1  # of the parameters of all blocks; a class with less is a head or a stem
_ALIKE = 2  # the largest block of a class has at most this many times the parameters of the smallest
_FEW = 4


class _RepeatedBlock(NamedTuple):
    name: str
    module: nn.Module

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


def repeated_blocks(module: nn.Module) -> list[str]:
    """Return the names of all repeated blocks, in the order in which the module holds them.

    Blocks are two or more modules of one class in an nn.ModuleList or nn.Sequential. The outermost ones count: encoder
    and decoder may have some each. If blocks of a class are few or of different sizes (the stages of a Swin
    transformer), the blocks within them, of several modules each, replace them if they have most of the parameters.
    Classes that together have less than a tenth of all blocks' parameters are left out.
    """
    found = _refined(list(_outermost(module, "")))
    sizes = {block.name: block.size for block in found}
    by_class = _by_class(found)
    large = [blocks for blocks in by_class if sum(sizes[b.name] for b in blocks) > _LEAST_SHARE * sum(sizes.values())]
    names = {block.name for blocks in large for block in blocks}
    return [name for name, _ in module.named_modules() if name in names]


def _outermost(module: nn.Module, prefix: str) -> Iterator[_RepeatedBlock]:
    children = [_RepeatedBlock(f"{prefix}{name}", child) for name, child in module.named_children()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    classes = [type(child.module) for child in children]
    for child in children:
        has_forward = type(child.module).forward is not nn.Module.forward
        if is_list and has_forward and classes.count(type(child.module)) > 1:
            yield child
        else:
            yield from _outermost(child.module, f"{child.name}.")


def _refined(blocks: Sequence[_RepeatedBlock]) -> list[_RepeatedBlock]:
    """Return the same blocks, or the blocks within them if these divide the parameters more evenly."""
    refined: list[_RepeatedBlock] = []
    for alike in _by_class(blocks):
        sizes = [block.size for block in alike]
        inner = [block for outer in alike for block in _outermost(outer.module, f"{outer.name}.")]
        within = [block for block in inner if next(block.module.children(), None) is not None]  # not a single Linear
        is_uneven = len(alike) < _FEW or max(sizes) > _ALIKE * min(sizes)
        has_most = 2 * sum(block.size for block in within) > sum(sizes)
        refined += _refined(within) if is_uneven and has_most else alike
    return refined


def _by_class(blocks: Sequence[_RepeatedBlock]) -> list[list[_RepeatedBlock]]:
    classes: dict[type[nn.Module], list[_RepeatedBlock]] = {}
    for block in blocks:
        classes.setdefault(type(block.module), []).append(block)
    return list(classes.values())
