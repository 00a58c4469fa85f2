"""Reducers for parts of functions and classes that travel by value, for which pickle and cloudpickle have none."""

import enum
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

_LruCache: Any = type(functools.lru_cache(lambda: None))  # the class that @functools.lru_cache makes of a function
_dispatching: Any = functools.singledispatch(lambda value: value)
_SINGLEDISPATCH = _dispatching.__code__  # all dispatching functions share it
_OWN_OF_SINGLEDISPATCH = ("register", "dispatch", "registry", "_clear_cache")
_HAS_LOCK = "lock" in vars(functools.cached_property(lambda self: None))  # until Python 3.11


def reduce_part(obj: Any) -> tuple[Any, ...] | None:
    """Return how pickle rebuilds `obj`; None if this module has no reducer for it."""
    if isinstance(obj, _LruCache):
        return _make_lru_cache, (obj.__wrapped__, obj.cache_parameters())
    if isinstance(obj, enum.Enum) and obj._name_ in type(obj).__members__:
        return getattr, (type(obj), obj._name_)  # not by the value, a copy of which may be equal to no member
    if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj and type(obj) is not types.ModuleType:
        return importlib.import_module, (obj.__name__,)  # a module that loads its parts late, or torch.ops
    if isinstance(obj, functools.cached_property):
        attributes = {name: value for name, value in vars(obj).items() if name != "lock"}
        return _make_cached_property, (type(obj),), attributes
    if isinstance(obj, types.FunctionType) and obj.__code__ is _SINGLEDISPATCH:
        # As the state: a registered function may call the dispatching one, and so contain it.
        dispatcher: Any = obj
        attributes = {name: value for name, value in vars(obj).items() if name not in _OWN_OF_SINGLEDISPATCH}
        state = dict(dispatcher.registry), attributes
        return _make_singledispatch, (obj.__name__,), state, None, None, _fill_singledispatch
    return None


def _make_lru_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _make_cached_property(kind: Any) -> Any:
    made = kind.__new__(kind)
    if _HAS_LOCK:
        made.lock = threading.RLock()
    return made


def _make_singledispatch(name: str) -> Any:
    def default(*args: Any, **kwargs: Any) -> None: ...

    default.__name__ = name  # shown in the message of a call without arguments
    return functools.singledispatch(default)


def _fill_singledispatch(made: Any, state: tuple[Mapping[type, Callable[..., Any]], Mapping[str, Any]]) -> None:
    functions, attributes = state
    for kind, function in functions.items():
        made.register(kind, function)
    functools.update_wrapper(made, functions[object], updated=())
    vars(made).update(attributes)
