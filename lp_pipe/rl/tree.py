"""Trees of arrays: dicts, tuples, named tuples and lists, nested, whose leaves are numpy arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def leaves_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each leaf, such as `observation['image']`, with the leaf; dicts in the order of their keys."""
    if type(tree) is np.ndarray:  # first, like the same check below, for speed
        yield path, tree
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, branch in zip(tree._fields, tree, strict=True):
            place = f"{path}.{name}" if path else name
            if type(branch) is np.ndarray:
                yield place, branch
            else:
                yield from leaves_of(branch, place)
    elif isinstance(tree, Mapping):
        for name in sorted(tree):
            yield from leaves_of(tree[name], f"{path}[{name!r}]")
    elif isinstance(tree, tuple | list):
        for index, branch in enumerate(tree):
            yield from leaves_of(branch, f"{path}[{index}]")
    elif tree is not None:
        yield path, tree


def rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree of the same structure with the next leaves, in the order of `leaves_of`."""
    if isinstance(tree, Mapping):
        return {name: rebuilt(tree[name], leaves) for name in sorted(tree)}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rebuilt(branch, leaves) for branch in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(rebuilt(branch, leaves) for branch in tree)
    return None if tree is None else next(leaves)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the tree of what the function returns for each leaf, with the leaves of the others at the same place."""
    columns = [[leaf for _, leaf in leaves_of(one)] for one in (tree, *others)]
    return rebuilt(tree, iter([function(*leaves) for leaves in zip(*columns, strict=True)]))


def stacked(trees: Sequence[Any]) -> Any:
    """Return one tree whose leaves have a new first dimension, from trees of the same structure."""
    return tree_map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), trees[0], *trees[1:])


def row(tree: Any, index: Any) -> Any:
    """Return the tree of `leaf[index]`."""
    return tree_map(lambda leaf: leaf[index], tree)


def concatenated(trees: Sequence[Any]) -> Any:
    """Return one tree of all leaves' rows, or None if there are none."""
    found = [tree for tree in trees if tree is not None and any(True for _ in leaves_of(tree))]
    if not found:
        return None
    return tree_map(lambda *leaves: np.concatenate(leaves), found[0], *found[1:])
