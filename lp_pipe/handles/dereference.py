"""Search and replacement of handles inside a node's arguments, however deep they are in containers."""

import copy
import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import Any

from lp_pipe.handles.arguments import check_arguments, declared_at
from lp_pipe.handles.base import Handle


class Deferred:
    """An object that is built inside the node: `Deferred(ctor, *args, **kwargs)`.

    It is built once per node, even when it is used twice. Handles and Deferreds among its own arguments are
    dereferenced first. A failure names the file and line where it was declared.

    Raises:
        TypeError: the constructor does not take the arguments.
    """

    def __init__(self, ctor: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self._ctor = ctor
        self._args = args
        self._kwargs = kwargs
        check_arguments("Deferred", ctor, args, kwargs)
        self._declared = declared_at()

    def __repr__(self) -> str:
        return f"Deferred({getattr(self._ctor, '__qualname__', self._ctor)}, declared at {self._declared})"

    def parts(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return its own arguments."""
        return self._args, self._kwargs

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the constructor with arguments that were dereferenced.

        Raises:
            RuntimeError: the constructor raised; says where the Deferred was declared.
        """
        try:
            return self._ctor(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(f"{self!r} could not be built: {type(error).__name__}: {error}") from error


def dereference(value: Any) -> Any:
    """Return `value` with every handle replaced by its client and every Deferred by its object.

    Containers keep their types, and those of the caller are not changed; an object without handles is returned as it
    is.
    """
    return _to_end(_replacing(value, {}))


def find_handles(value: Any) -> Iterator[Handle[Any]]:
    """Yield the handles that `dereference` would replace, and those that functions capture; each once, in order."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        if isinstance(item, Handle):
            seen.add(id(item))
            yield item
        elif parts := _reachable(item):
            seen.add(id(item))
            stack.extend(reversed(parts))


# A step of a replacement: a generator that yields the replacement of a part and is sent the new part. Containers may be
# nested deeper than Python's stack allows, so the generators do not call each other.
_Replacing = Generator["_Replacing", Any, Any]


def _to_end(replacing: _Replacing) -> Any:
    stack = [replacing]
    result: Any = None
    while stack:
        try:
            stack.append(stack[-1].send(result))
            result = None
        except StopIteration as done:
            stack.pop()
            result = done.value
    return result


def _replacing(value: Any, memo: dict[int, Any]) -> _Replacing:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Handle):
        result: Any = value.dereference()
    elif isinstance(value, Deferred):
        args, kwargs = value.parts()
        result = value.build((yield _replacing(args, memo)), (yield _replacing(kwargs, memo)))
    elif _is_container(value) and next(_find_handles_or_deferred(value), None) is not None:
        result = yield _rebuilding(value, memo)
    else:
        return value
    return memo.setdefault(id(value), result)  # a tuple in a cycle was met, and rebuilt, among its own items


def _rebuilding(value: Any, memo: dict[int, Any]) -> _Replacing:
    if isinstance(value, tuple):
        items = []
        for item in value:
            items.append((yield _replacing(item, memo)))
        # Not type(value)(*items) for namedtuples: a constructor that checks its fields expects handles.
        return getattr(value, "_make", tuple)(items)
    new = copy.copy(value)  # copies a dataclass without its constructor, frozen or not
    memo[id(value)] = new  # before its items, because a list may hold itself
    if isinstance(value, dict):
        for key, item in value.items():
            new[key] = yield _replacing(item, memo)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            new[index] = yield _replacing(item, memo)
    else:
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(new, field.name, (yield _replacing(getattr(value, field.name), memo)))
    return new


def _is_container(value: Any) -> bool:
    if isinstance(value, type):
        return False
    is_tuple = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))
    return is_tuple or type(value) in (list, dict, OrderedDict, defaultdict) or dataclasses.is_dataclass(value)


def _find_handles_or_deferred(value: Any) -> Iterator[Any]:
    """Yield handles and Deferreds like find_handles, but do not look into Deferreds and functions."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (Handle, Deferred)):
            yield item
        elif _is_container(item) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(_children(item))


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return [getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _reachable(value: Any) -> list[Any]:
    """Return the parts of `value` that may hide a handle: items, a Deferred's arguments, a function's captures."""
    if isinstance(value, Deferred):
        return list(value.parts())
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return _children(value) if _is_container(value) else []


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (reading an empty cell raises)
    except ValueError:
        return False
    return True
