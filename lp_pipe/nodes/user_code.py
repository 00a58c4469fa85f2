"""Calls of the user's own functions: the result must be real, and be in the process that made the call."""

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
    """Return the function's result. A child process that it has forked ends here, as at the end of a script.

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

    A `__getattr__` is not called: a wrapper that answers to every name would seem to have every optional method.
    """
    if inspect.getattr_static(target, name, None) is None:
        return None
    found = getattr(target, name, None)
    return found if callable(found) else None


def _not_run(function: Callable[..., Any], result: Any) -> TypeError:
    if isinstance(result, CoroutineType):
        result.close()  # otherwise Python warns that it was never awaited, which the error says already
    name = getattr(function, "__qualname__", None) or repr(function)
    kind, remedy = _NOT_RUN[type(result)]
    return TypeError(f"{name} is {kind}, of which a plain call runs nothing: {remedy.format(name)}")


def _end_child(error: BaseException | None) -> NoReturn:
    """Exit with the status that Python gives a script, without exit functions: those belong to the parent process."""
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
