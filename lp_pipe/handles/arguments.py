"""A check, in the process that declares a node or a Deferred, that its arguments fit what it will call."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PREFIXES: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def check_arguments(
    what: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], hint: str = ""
) -> None:
    """Refuse arguments with which `function` cannot be called.

    Only the parameters of Python code are checked: those of builtins, and of classes without an `__init__` or `__new__`
    in Python, are left to the call.

    Raises:
        TypeError: says that `what` will call the function, its parameters, and which arguments do not fit; ends with
            `hint`.
    """
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__qualname__", None) or repr(function)
        parameters = ", ".join(_described(parameter) for parameter in signature.parameters.values())
        given = [f"{len(args)} positional argument{'' if len(args) == 1 else 's'}", *(f"{key}=…" for key in kwargs)]
        raise TypeError(f"{what}: {name}({parameters}) does not fit {', '.join(given)}: {error}{hint}") from None


def declared_at() -> str:
    """Return `file:line` of the innermost caller that is not part of lp_pipe."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    if not _has_python_parameters(function):
        return None
    try:
        # A signature that was set by hand may be wrong: pydantic's models ignore arguments that theirs does not have.
        if inspect.getattr_static(function, "__signature__", None) is not None:
            return None
        # A decorator's function takes what the decorator says, and may add to the arguments of the decorated one.
        return inspect.signature(function, follow_wrapped=False)
    except Exception:  # builtins have none, and metaclasses may raise anything
        return None


def _has_python_parameters(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, type):
        return not inspect.isbuiltin(function)
    makers = (type(function).__call__, function.__new__, function.__init__)  # type: ignore[misc]
    return any(isinstance(maker, types.FunctionType) for maker in makers)


def _described(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is inspect.Parameter.empty else "=…"
    return f"{_PREFIXES.get(parameter.kind, '')}{parameter.name}{default}"


def _is_ours(module_name: object) -> bool:
    return isinstance(module_name, str) and (module_name == "lp_pipe" or module_name.startswith("lp_pipe."))
