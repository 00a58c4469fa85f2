"""The module that a script runs as, `__main__`, in the processes of its nodes: it holds what travels there by value.

A node's own code needs it: `pickle`, `torch.save` and multiprocessing's pools name classes and functions by their
module, `inspect` finds their source by the module's file, `typing` and `doctest` look into its namespace.
"""

import contextlib
import itertools
import os
import sys
import types
import typing
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloudpickle import cloudpickle

MAIN = "__main__"
_FACTS = ("__file__", "__package__", "__doc__")  # facts about a module that are kept where they are text

_here = uuid.uuid4().hex  # this process's id; a forked process gets another
_numbers = itertools.count()
# the process and number that each function came from
_origins: "weakref.WeakKeyDictionary[Any, tuple[str, int]]" = weakref.WeakKeyDictionary()
_own_functions: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()

_arrived_modules: set[str] = set()  # modules of this process that hold only what has travelled here
_bound: dict[tuple[str, str], Any] = {}  # the identity of the object that such a module has under a name
_is_entering = False


def is_known_by_name(obj: Any) -> bool:
    """Return whether the object's module has it under its name: not lambdas, local classes or decorated originals."""
    names = getattr(sys.modules.get(obj.__module__), "__dict__", {}) if isinstance(obj.__module__, str) else {}
    return names.get(obj.__qualname__) is obj


def has_origin(function: Any) -> bool:
    """Return whether the process that `function` comes from can find it again: it has a name in its module there."""
    return function in _origins or is_known_by_name(function)


def origin_of(function: Any) -> tuple[str, int]:
    """Return the process that `function` came from, and its number there."""
    if function not in _origins:
        number = next(_numbers)
        _origins[function] = _here, number
        _own_functions[number] = function
    return _origins[function]


def rebuild_function(
    module_name: str, name: str, origin: tuple[str, int], make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Return the function itself in its own process; elsewhere make one and bind it in this process's modules."""
    process, number = origin
    if process == _here and number in _own_functions:
        return _own_functions[number]
    made = make(*arguments)
    _origins[made] = origin
    _bind(module_name, name, made, origin)
    return made


def fill_function(function: Any, setter_and_state: tuple[Callable[[Any, Any], object], Any]) -> None:
    """Set the state of a function with `setter`, unless the function is this process's own."""
    setter, state = setter_and_state
    process, _ = _origins.get(function, ("", 0))
    if process != _here:
        setter(function, state)


def rebuild_class(module_name: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return what `make` makes of a class, and bind it in this process's modules."""
    made = make(*arguments)
    _bind(module_name, name, made, arguments[0])
    return made


def fill_class(kind: type, state: tuple[Callable[[type, Any], object], Any, Mapping[str, Any]]) -> None:
    """Set the class's attributes, and give its module the names that annotations of the class refer to."""
    set_attributes, attributes, names_in_annotations = state
    set_attributes(kind, attributes)
    if kind.__module__ in _arrived_modules:
        for name, value in names_in_annotations.items():
            sys.modules[kind.__module__].__dict__.setdefault(name, value)


def names_in_annotations(annotations: Any, module_names: Mapping[str, Any]) -> dict[str, Any]:
    """Return what text annotations (`from __future__ import annotations`) name in their module.

    `typing.get_type_hints` looks there for classes, modules, and names of `typing`; nothing else is returned.
    """
    texts = [text for text in annotations.values() if isinstance(text, str)] if isinstance(annotations, dict) else []
    found: dict[str, Any] = {}
    for text in texts:
        with contextlib.suppress(SyntaxError, ValueError):
            for name in compile(text, "<annotation>", "eval").co_names:
                value = module_names.get(name)
                is_of_typing = type(value).__module__ == typing.__name__
                if isinstance(value, type | types.ModuleType | types.GenericAlias | types.UnionType) or is_of_typing:
                    found[name] = value
    return found


class MainGlobals:
    """A stand-in, in a pickle, for the globals of the script's functions: a node's functions share its `__main__`."""

    def __reduce__(self) -> tuple[Any, ...]:
        own = facts()
        own.pop("__doc__", None)  # it may be long, and functions that use it bring it along
        return _globals_of_main, (own,)


def _globals_of_main(facts_there: dict[str, str]) -> dict[str, Any]:
    # A function that arrives with a call has the values of its sender, and leaves those of this process alone.
    return sys.modules[MAIN].__dict__ if _is_entering else {"__name__": MAIN, **facts_there}


def facts() -> dict[str, str]:
    """Return what a node's `__main__` must know of this process's script: its file, package and documentation."""
    found = vars(sys.modules[MAIN])
    return {name: value for name in _FACTS if isinstance(value := found.get(name), str)}


def become_main(facts_there: Mapping[str, str]) -> None:
    """Replace this process's `__main__` by an empty module, for names of the script with these facts."""
    _make_module(MAIN).__dict__.update(facts_there)


def is_node() -> bool:
    """Return whether this process has modules that hold what has travelled here."""
    return bool(_arrived_modules)


def has_travelled(obj: Any) -> bool:
    """Return whether a class or function is of a module that holds only what has travelled here."""
    return isinstance(obj, type | types.FunctionType) and obj.__module__ in _arrived_modules


@contextlib.contextmanager
def defining_main() -> Iterator[None]:
    """Make the functions of the script that are loaded in the body belong to this process's `__main__`."""
    global _is_entering
    _is_entering = True
    try:
        yield
    finally:
        _is_entering = False


def _bind(module_name: str, name: str, obj: Any, identity: Any) -> None:
    """Give the module the object, unless it has the same one; a newer one replaces it (a cell that ran again)."""
    if module_name not in sys.modules:
        _make_module(module_name)
    if module_name in _arrived_modules and _bound.get((module_name, name)) != identity:
        _bound[module_name, name] = identity
        sys.modules[module_name].__dict__[name] = obj


def _make_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    _arrived_modules.add(name)
    if name != MAIN:  # `__main__` goes by value anyway
        cloudpickle.register_pickle_by_value(module)
    return module


def _be_another_process() -> None:
    global _here
    _here = uuid.uuid4().hex


os.register_at_fork(after_in_child=_be_another_process)
