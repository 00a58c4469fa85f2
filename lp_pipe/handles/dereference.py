"""Find and replace the handles inside a node's arguments, however deep they lie in containers."""

import copy
import dataclasses
import functools
import inspect
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from lp_pipe.handles.base import Handle


class Deferred:
    """An object that is built inside the node: `Deferred(ctor, *args, **kwargs)`.

    Built once per node, even when it is used twice. Handles and Deferreds among its own arguments are dereferenced
    first. A failure names the file and line where it was declared.
    """

    def __init__(self, ctor: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self._ctor = ctor
        self._args = args
        self._kwargs = kwargs
        caller = inspect.stack(context=0)[1]
        self._declared = f"{caller.filename}:{caller.lineno}"

    def __repr__(self) -> str:
        return f"Deferred({getattr(self._ctor, '__qualname__', self._ctor)}, declared at {self._declared})"

    def parts(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its own arguments."""
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
    """`value` with every handle replaced by its client and every Deferred by its object.

    Containers keep their types; those of the caller are not changed; what holds no handle is passed on as it is.
    """
    return _replace(value, {})


def find_handles(value: Any) -> Iterator[Handle[Any]]:
    """The handles that `dereference` would replace, and those that functions capture; each once, in order."""
    yield from _find(value, set())


def _replace(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Handle):
        result: Any = value.dereference()
    elif isinstance(value, Deferred):
        args, kwargs = value.parts()
        result = value.build(_replace(args, memo), _replace(kwargs, memo))
    elif _is_container(value) and next(find_handles_or_deferred(value), None) is not None:
        result = _rebuild(value, memo)
    else:
        return value
    return memo.setdefault(id(value), result)  # a tuple in a cycle was met, and rebuilt, among its own items


def _rebuild(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return _rebuild_dict(value, memo)
    if isinstance(value, list):
        new = copy.copy(value)
        memo[id(value)] = new  # before its items: a list may hold itself
        new[:] = [_replace(item, memo) for item in value]
        return new
    if isinstance(value, tuple):
        items = [_replace(item, memo) for item in value]
        # Not type(value)(*items) for namedtuples: a constructor that checks its fields expects handles.
        return getattr(value, "_make", tuple)(items)
    new = copy.copy(value)  # a dataclass: no constructor runs again, frozen or not
    memo[id(value)] = new
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(new, field.name, _replace(getattr(value, field.name), memo))
    return new


def _rebuild_dict(value: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    new = copy.copy(value)
    memo[id(value)] = new
    for key, item in value.items():
        new[key] = _replace(item, memo)
    return new


def _is_container(value: Any) -> bool:
    if isinstance(value, type):
        return False
    is_tuple = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))
    return is_tuple or type(value) in (list, dict, OrderedDict, defaultdict) or dataclasses.is_dataclass(value)


def find_handles_or_deferred(value: Any) -> Iterator[Any]:
    """Like find_handles, but stops at Deferreds and does not look into functions."""
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


def _find(value: Any, seen: set[int]) -> Iterator[Handle[Any]]:
    if id(value) in seen:
        return
    if isinstance(value, Handle):
        seen.add(id(value))
        yield value
        return
    parts = _reachable(value)
    if parts:
        seen.add(id(value))
    for part in parts:
        yield from _find(part, seen)


def _reachable(value: Any) -> list[Any]:
    """What may hide a handle inside `value`: items, a Deferred's arguments, what a function has captured."""
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
