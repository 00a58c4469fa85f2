"""Make many values of one structure from their tensors; pytree would look up every container for each of them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lp_pipe.private_torch import pytree

Maker = Callable[[Sequence[Tensor]], Any]


def assembler(treedef: pytree.TreeSpec, are_tensors: Sequence[bool], constants: Sequence[Any]) -> Maker:
    """Return a function that makes a value from its tensors.

    are_tensors: whether each leaf is a tensor.
    constants: the other leaves, which are the same objects in every value.
    """
    return _maker(treedef, _makers(are_tensors, constants))


@dataclass(frozen=True)
class _Constant:
    """A maker that returns the same object for every value."""

    value: Any

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        return self.value


def _makers(are_tensors: Sequence[bool], constants: Sequence[Any]) -> Iterator[Maker]:
    """Yield the makers of a value's leaves, in order."""
    tensors, others = itertools.count(), iter(constants)
    for is_tensor in are_tensors:
        yield _nth(next(tensors)) if is_tensor else _Constant(next(others))


def _nth(index: int) -> Maker:
    return lambda tensors: tensors[index]


def _maker(treedef: pytree.TreeSpec, leaves: Iterator[Maker]) -> Maker:
    if treedef.is_leaf():
        return next(leaves)
    parts = [_maker(child, leaves) for child in treedef.children()]
    if treedef.type is tuple:
        constants = [part.value for part in parts if isinstance(part, _Constant)]
        all_are_constant = len(constants) == len(parts)
        return _Constant(tuple(constants)) if all_are_constant else _tuple_of(parts)
    if treedef.type is list:
        return lambda tensors: [part(tensors) for part in parts]
    flat = pytree.TreeSpec(treedef.type, treedef.context, [pytree.treespec_leaf()] * len(parts))
    return lambda tensors: pytree.tree_unflatten([part(tensors) for part in parts], flat)


def _tuple_of(parts: Sequence[Maker]) -> Maker:
    if len(parts) == 2:  # nearly always: a message is a value and its metadata
        first, second = parts
        return lambda tensors: (first(tensors), second(tensors))
    return lambda tensors: tuple([part(tensors) for part in parts])
