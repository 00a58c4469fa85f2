"""Checks whether observations fit their space. Needs no gymnasium."""

from collections.abc import Mapping
from typing import Any

import numpy as np


class DoesNotFit(Exception):
    """A value that does not fit its space; args: the path of the leaf, and the reason."""


def fitted(space: Any, value: Any, path: str) -> Any:
    """Return an observation as a tree of arrays of its space's shapes and dtypes; whole numbers may be Python's.

    Raises:
        DoesNotFit: it has another structure, shape or dtype, or contains NaN.
    """
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, Mapping):
        if not isinstance(value, Mapping) or set(value) != set(spaces):
            raise DoesNotFit(path, f"must be a dict with the keys {sorted(spaces)}, got {_described(value)}")
        return {name: fitted(spaces[name], value[name], f"{path}[{name!r}]") for name in sorted(spaces)}
    if isinstance(spaces, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(spaces):
            raise DoesNotFit(path, f"must be a tuple of {len(spaces)}, got {_described(value)}")
        return tuple(fitted(one, part, f"{path}[{i}]") for i, (one, part) in enumerate(zip(spaces, value, strict=True)))
    leaf = np.asarray(value)
    is_number = np.issubdtype(space.dtype, np.integer) and isinstance(value, int) and not isinstance(value, bool)
    leaf = leaf.astype(space.dtype) if is_number else leaf
    if leaf.shape != space.shape or leaf.dtype != space.dtype:
        raise DoesNotFit(path, f"has shape {leaf.shape} and dtype {leaf.dtype}, not {space.shape} and {space.dtype}")
    if leaf.dtype.kind == "f" and np.isnan(leaf).any():
        raise DoesNotFit(path, "contains NaN")
    return leaf.copy()


def _described(value: Any) -> str:
    return f"a dict with the keys {sorted(value)}" if isinstance(value, Mapping) else type(value).__name__
