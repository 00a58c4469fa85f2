"""Tensors inside of objects that are no containers to torch's pytree, such as dataclasses and subclasses of dict."""

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_DEEPEST = 5  # an object that holds more than such levels is no output of a layer
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, types.ModuleType, nn.Module)


def hidden_tensors(leaf: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that a leaf holds, with the way to it: attributes and items, joined by dots."""
    if not isinstance(leaf, _PLAIN):
        yield from _below(leaf, (), {id(leaf)})


def _below(value: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    for name, part in _parts(value):
        if isinstance(part, Tensor):
            yield ".".join((*path, name)), part
        elif not isinstance(part, _PLAIN) and id(part) not in seen and len(path) < _DEEPEST:
            seen.add(id(part))
            yield from _below(part, (*path, name), seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(value, name):
                yield name, getattr(value, name)
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):  # no other sequences: a data set is one, too
        yield from ((str(index), part) for index, part in enumerate(value))
