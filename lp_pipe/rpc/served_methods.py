"""The methods of an object that a server lets its callers use."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from lp_pipe.errors import MethodNotFound

LIST_METHODS = "__list_methods__"
START_WITHOUT_STATE = "__start_without_state__"  # tells a server that has lost its state to serve its initial one
CACHE_INFO = "__cache_info__"  # answered by the object itself, if it is a cache


def find_method(target: object, server: str, name: str) -> Callable[..., Any]:
    """Return the method that callers know as `name`.

    server: the node, for messages ("server/0").

    Raises:
        MethodNotFound: callers may use no such method; names the nearest one.
    """
    if name == LIST_METHODS:
        return lambda: public_methods(target)
    if name == START_WITHOUT_STATE:
        return lambda: False  # a server that has lost its state answers it before it gets here
    if is_exposed(target, name) or (name == CACHE_INFO and hasattr(type(target), CACHE_INFO)):
        found: Callable[..., Any] = getattr(target, name)
        return found
    known = public_methods(target)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known) or 'no public methods'}"
    raise MethodNotFound(f"{server} ({type(target).__name__}) has no public method {name!r}; {hint}")


def is_exposed(target: object, name: str) -> bool:
    """Return whether callers may use the name: a public callable, or `__call__`; never data, never a property."""
    if name.startswith("_") and name != "__call__":
        return False
    kind: Any = type(target)
    if _is_computed(kind, name):
        return False  # the check must not compute it
    return callable(getattr(target, name, None))


def public_methods(target: object) -> list[str]:
    """Return the sorted names of the methods that callers may use."""
    return sorted(name for name in dir(target) if is_exposed(target, name))


@functools.lru_cache(maxsize=1024)
def _is_computed(kind: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), (property, functools.cached_property))
