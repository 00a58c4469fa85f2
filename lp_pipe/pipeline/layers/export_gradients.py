"""Gradients of the user's own, which torch.export leaves out of the graph without an error."""

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import function_behind, grad_mode_set_by, hooks_of, pytree, saved_tensors_pack_hook

# torch.utils.checkpoint's function: its gradient is the graph's. Functions in torch._library, for custom_op and the
# like, are operations of the graph, and are left out by their module.
_HARMLESS = ("_NoopSaveInputs",)


@contextmanager
def own_gradients_refused(module: nn.Module) -> Iterator[None]:
    """Trace `module` in the body, and refuse a backward of the user's own.

    The graph has the operations of forward and their gradients, no others.

    Raises:
        PipelineError: the module has a backward of its own somewhere.
    """
    for name, part in module.named_modules():
        if hooks_of(part, "backward", "backward_pre"):
            raise _refusal(module, f"a backward hook of {name or 'the module'!r}")
    seen = _OwnGradients()

    def look(_: nn.Module, __: Any, output: Any) -> None:
        seen.functions |= dict.fromkeys(_functions_behind(output))  # also functions that call no operation of torch's

    handle = module.register_forward_hook(look)
    try:
        with seen:
            yield
    finally:
        handle.remove()
    if seen.functions:
        raise _refusal(module, f"the backward of the torch.autograd.Function {next(iter(seen.functions))}")
    if seen.hooks:
        raise _refusal(module, "a hook of a tensor (Tensor.register_hook)")
    if seen.hooks_of_saved:
        raise _refusal(module, "what torch.autograd.graph.saved_tensors_hooks make of the tensors")


class _OwnGradients(TorchFunctionMode):
    """A mode that sees hooks of tensors, and what runs in the forward of a torch.autograd.Function.

    It sees them even if nothing requires a gradient yet: an input may come from a layer that is trained, and frozen
    parameters may be trained later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks = 0
        self.hooks_of_saved = False
        self.functions: dict[str, None] = {}
        self._is_recorded = True  # whether autograd records

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.hooks += function is Tensor.register_hook
        for_saved = saved_tensors_pack_hook()
        if for_saved is not None:  # a builtin has no module, or None as its module
            self.hooks_of_saved |= not str(getattr(for_saved, "__module__", None)).startswith("torch.")
        grad_mode = grad_mode_set_by(function, args)
        if grad_mode is not None:
            self._is_recorded = grad_mode
        elif self._is_recorded:
            self.functions |= dict.fromkeys(_functions_around(sys._getframe(1)))
        return function(*args, **(kwargs or {}))


def _functions_around(frame: FrameType | None) -> Iterator[str]:
    """Yield the names of the functions with a forward that is running in the frame, or in one that has called it."""
    own = _own_forwards(len(torch.autograd.Function.__subclasses__()))
    while frame is not None:
        if frame.f_code in own and any(map(_may_be_trained, _arguments_of(frame))):
            yield own[frame.f_code]
        frame = frame.f_back


@functools.lru_cache(maxsize=1)
def _own_forwards(_number: int) -> dict[CodeType, str]:
    """Return the names of all functions but torch's, by the code of their forwards. _number: the cache's key."""
    found: dict[CodeType, str] = {}
    waiting = torch.autograd.Function.__subclasses__()
    while waiting:
        function = waiting.pop()
        waiting.extend(function.__subclasses__())
        code = getattr(inspect.unwrap(function.forward), "__code__", None)
        if code is not None and _is_own(function):
            found[code] = function.__qualname__
    return found


def _arguments_of(frame: FrameType) -> Iterator[Any]:
    """Yield what the frame's function was called with, with each of `*args`."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    for name in code.co_varnames[:count]:
        yield frame.f_locals.get(name)
    if code.co_flags & inspect.CO_VARARGS:
        yield from frame.f_locals.get(code.co_varnames[count], ())


def _may_be_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _functions_behind(output: Any) -> Iterator[str]:
    waiting = [leaf.grad_fn for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    met: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        waiting.extend(before for before, _ in node.next_functions)
        if isinstance(node, BackwardCFunction):
            function = function_behind(node)
            if function is not None and _is_own(function):
                yield function.__qualname__


def _is_own(function: type[torch.autograd.Function]) -> bool:
    return not function.__module__.startswith("torch._") and function.__qualname__ not in _HARMLESS


def _refusal(module: nn.Module, what: str) -> PipelineError:
    return PipelineError(
        f"{type(module).__name__} cannot be split: torch.export would leave out {what}, and the pieces would train in "
        "another way. Make it a torch.library.custom_op with register_autograd, or write the layers by hand"
    )
