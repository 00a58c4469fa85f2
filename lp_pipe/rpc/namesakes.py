"""What a script defines is found by its name in the nodes too, although it travels there by value.

A node's own code looks for it: `pickle`, `torch.save` and the pools of multiprocessing name classes and functions by
their module, and the module that a script was run as (`__main__`) is another one in a node's process.
"""

import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from multiprocessing.reduction import ForkingPickler

MAIN = "__main__"
_ours: set[str] = set()  # modules of this process that hold nothing but what has travelled here


def is_known_by_name(obj: Any) -> bool:
    """Whether its module has it under its own name: not lambdas, local classes, what a decorator has replaced."""
    names = getattr(sys.modules.get(obj.__module__), "__dict__", {})
    return names.get(obj.__qualname__) is obj


def rebuild(module_name: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What cloudpickle makes of a function or class, which from now on is found in this process's modules."""
    obj = make(*arguments)
    if module_name not in sys.modules:
        _make_module(module_name)
    if module_name in _ours:
        sys.modules[module_name].__dict__.setdefault(name, obj)
    return obj


def enter_node() -> None:
    """This process is a node's: its `__main__` is where the script's names go, and its children get them as well."""
    from multiprocessing.reduction import ForkingPickler  # the template of nodes has loaded it

    _make_module(MAIN)
    ForkingPickler.reducer_override = _reduced_for_child  # type: ignore[method-assign, assignment]


def _make_module(name: str) -> None:
    module = types.ModuleType(name)
    sys.modules[name] = module
    _ours.add(name)
    if name != MAIN:  # that goes by value anyway
        cloudpickle.register_pickle_by_value(module)


def _reduced_for_child(pickler: "ForkingPickler", obj: Any) -> Any:
    """For multiprocessing: a child that is not forked has none of these modules."""
    if isinstance(obj, type | types.FunctionType) and obj.__module__ in _ours and is_known_by_name(obj):
        from lp_pipe.rpc import codec  # which needs this module

        return _arrive_in_child, (codec.dumps(obj),)
    return NotImplemented


def _arrive_in_child(data: bytes) -> Any:
    from lp_pipe.rpc import codec

    if not _ours:
        enter_node()
    return codec.loads(data)
