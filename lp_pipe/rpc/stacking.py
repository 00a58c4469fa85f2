"""Values of several calls as one, and the result as several."""

import sys
from typing import Any

# By the library whose stack() joins them; masked arrays before their base, whose stack() forgets the masks.
_ARRAYS = (("numpy.ma", "MaskedArray"), ("numpy", "ndarray"), ("torch", "Tensor"))


def stack(values: list[Any] | tuple[Any, ...]) -> Any:
    """Arrays and tensors on a new axis 0, dicts and tuples member by member, everything else as a list.

    Raises:
        ValueError: shapes, keys or lengths differ.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return list(values)
    for library, kind in _ARRAYS:
        if _is_a(first, library, kind):
            return sys.modules[library].stack(list(values))
    if isinstance(first, dict):
        _same([sorted(value, key=repr) for value in values], "keys")
        return {key: stack([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        _same([len(value) for value in values], "lengths")
        return _like(first, [stack(column) for column in zip(*values, strict=True)])
    return list(values)


def split(result: Any, count: int) -> list[Any]:
    """Undo `stack`: one value for each of `count` calls.

    Raises:
        ValueError: it has another length.
        TypeError: it cannot be split.
    """
    if isinstance(result, dict):
        columns = {key: split(value, count) for key, value in result.items()}
        return [{key: column[index] for key, column in columns.items()} for index in range(count)]
    if isinstance(result, tuple):
        parts = [split(value, count) for value in result]
        return [_like(result, [part[index] for part in parts]) for index in range(count)]
    if result is None:
        return [None] * count
    if not (isinstance(result, list) or any(_is_a(result, library, kind) for library, kind in _ARRAYS)):
        raise TypeError(f"a batched handler returned {type(result).__name__}; it must be a list, array, dict or tuple")
    length = len(result) if not hasattr(result, "shape") or result.shape else 0
    if length != count:
        raise ValueError(f"a batched handler returned {length} results for a batch of {count}")
    return list(result)


def _like(example: tuple[Any, ...], items: list[Any]) -> Any:
    return type(example)(*items) if hasattr(example, "_fields") else tuple(items)


def _is_a(value: Any, library: str, kind: str) -> bool:
    module = sys.modules.get(library)  # a value of a library that was never imported does not exist
    return module is not None and isinstance(value, getattr(module, kind))


def _same(properties: list[Any], what: str) -> None:
    for other in properties:
        if other != properties[0]:
            raise ValueError(f"calls in one batch differ in their {what}: {properties[0]} and {other}")
