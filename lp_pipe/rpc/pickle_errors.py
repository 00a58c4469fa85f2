"""Errors that name the part of a value that does not pickle."""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lp_pipe.errors import SerializationError
from lp_pipe.rpc import codec
from lp_pipe.rpc.remote_error import text_of

_MAX_DEPTH = 12
_TOO_DEEP = (
    "RecursionError: its parts are nested too deeply for pickle, which needs some of Python's stack for each level: "
    "make it flatter, or build it where it is used"
)


_CODE_HINT = (
    "It is part of a function or class that travels by value, because other processes cannot import it by name: define "
    "that in a module that the script imports (or start the script with `lp_pipe launch`), and only its name travels. "
    "On several hosts that module must be in a folder given as sync=, or installed there."
)


class Unpicklable(NamedTuple):
    """The innermost part that does not pickle. `is_of_code`: the globals of a function, or a class, hold it."""

    path: str
    type_name: str
    error: str
    is_of_code: bool = False

    @property
    def code_hint(self) -> str:
        """Advice as lines to add to a message; empty for data."""
        return f"\n{_CODE_HINT}" if self.is_of_code else ""


Encode = Callable[[Any], object]


def find_unpicklable(value: Any, path: str, encode: Encode = codec.encode) -> Unpicklable | None:
    """Return the innermost part of `value` that does not pickle; None when all of it does.

    Paths read like Python: `args[1]['lock']`, `config.lock`, `closure variable 'lock' of f`.
    """
    error = _error_of(value, encode)
    if error is None:
        return None
    return _descend(value, Unpicklable(path, type(value).__name__, error), encode, set(), 0)


def pickle_error(
    call: str,
    parts: Iterable[tuple[str, Any]],
    error: BaseException,
    *,
    is_same_process: Callable[[], bool] = codec.never,
) -> SerializationError:
    """Return the error for a call with arguments or a result (`parts`, with their names) that do not pickle."""
    encode = functools.partial(codec.encode, is_same_process=is_same_process)
    for path, value in parts:
        unpicklable = find_unpicklable(value, path, encode)
        if unpicklable is not None:
            where = f"{unpicklable.path} of type {unpicklable.type_name}"
            return SerializationError(f"{call}: cannot pickle {where}: {unpicklable.error}{unpicklable.code_hint}")
    return SerializationError(f"{call}: cannot pickle the value, though every part pickles: {text_of(error)}")


def _descend(value: Any, unpicklable: Unpicklable, encode: Encode, seen: set[int], depth: int) -> Unpicklable:
    seen.add(id(value))
    if depth < _MAX_DEPTH and unpicklable.error != _TOO_DEEP:
        for part, path in _parts(value, unpicklable.path):
            if id(part) in seen:
                continue
            error = _error_of(part, encode)
            if error is not None:
                is_of_code = isinstance(value, type) or path.startswith(f"{unpicklable.path}: global variable")
                inner = Unpicklable(path, type(part).__name__, error, is_of_code or unpicklable.is_of_code)
                return _descend(part, inner, encode, seen, depth + 1)
    return unpicklable


def _error_of(value: Any, encode: Encode) -> str | None:
    if codec.is_atomic(value):
        return None
    try:
        encode(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's __reduce__ raises is the error to report, even SystemExit
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            return _TOO_DEEP
        return f"{type(error).__name__}: {text_of(error)}"
    return None


def _parts(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the parts of a value as pickle sees it, each with its path, as far as they can be looked at."""
    # such as a library's closed file or a __repr__: the caller must get its error even so
    with contextlib.suppress(Exception):
        yield from _all_parts(value, path)


def _all_parts(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield item, f"{path}[{key!r}]"
        for key in value:
            yield key, f"{path}'s key {key!r}"
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield item, f"{path}[{index}]"
    elif isinstance(value, functools.partial):
        yield value.func, f"{path}.func"
        yield from _parts(value.args, f"{path}.args")
        yield from _parts(value.keywords, f"{path}.keywords")
    elif isinstance(value, types.MethodType):
        yield value.__self__, f"{path}.__self__"
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value, path)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield getattr(value, field.name), f"{path}.{field.name}"
    elif isinstance(value, type):
        for name, item in vars(value).items():
            if not name.startswith("__"):
                yield item, f"{path}.{name}"
    yield from _attributes(value, path)


def _function_parts(function: types.FunctionType, path: str) -> Iterator[tuple[Any, str]]:
    name = function.__qualname__
    try:
        names = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return
    for variable, item in names.nonlocals.items():
        yield item, f"{path}: closure variable {variable!r} of {name}"
    for variable, item in names.globals.items():
        yield item, f"{path}: global variable {variable!r} of {name}"
    for index, item in enumerate(function.__defaults__ or ()):
        yield item, f"{path}: default argument {index} of {name}"
    for variable, item in (function.__kwdefaults__ or {}).items():
        yield item, f"{path}: default argument {variable!r} of {name}"


def _attributes(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, item in attributes.items():
            yield item, f"{path}.{name}"
    for name in (name for kind in type(value).__mro__ for name in _slots(kind)):
        if hasattr(value, name):
            yield getattr(value, name), f"{path}.{name}"
    yield type(value), f"{path}: its class {type(value).__qualname__}"


def _slots(kind: type) -> Iterable[str]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else names
