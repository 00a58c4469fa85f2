"""A node's calls of the user's own functions: what comes back must be their result, and in the process that called."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

_NOT_RUN = {
    CoroutineType: ("async", "await it: lambda: asyncio.run({}(...))"),
    AsyncGeneratorType: ("an async generator", "iterate over it in a function of your own"),
    GeneratorType: ("a generator", "iterate over it in a function of your own"),
}


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The function's result. A child that it has forked ends here, as at the end of a script: the node is its parent.

    Raises:
        TypeError: it is an async or generator function, nothing of which has run.
    """
    process = os.getpid()
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        if os.getpid() != process:
            _end_child(error)
        raise
    if os.getpid() != process:
        _end_child(None)
    if type(result) in _NOT_RUN:
        raise _not_run(function, result)
    return result


def optional_method(target: object, name: str) -> Callable[..., Any] | None:
    """Return the method `name` if the target's class or the target itself defines it, else None.

    A `__getattr__` is not asked: a wrapper that answers to every name would seem to have every optional method.
    """
    if inspect.getattr_static(target, name, None) is None:
        return None
    found = getattr(target, name, None)
    return found if callable(found) else None


def _not_run(function: Callable[..., Any], result: Any) -> TypeError:
    if isinstance(result, CoroutineType):
        result.close()  # or Python warns that nobody has awaited it, which is said here
    name = getattr(function, "__qualname__", None) or repr(function)
    kind, remedy = _NOT_RUN[type(result)]
    return TypeError(f"{name} is {kind}: a node only calls it, which runs nothing of it; {remedy.format(name)}")


def _end_child(error: BaseException | None) -> NoReturn:
    """With the status that Python gives a script; without exit functions, which are the node's, and its parent's."""
    status: Any = error.code if isinstance(error, SystemExit) else None if error is None else 1
    try:
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF if isinstance(status, int) else status is not None)
