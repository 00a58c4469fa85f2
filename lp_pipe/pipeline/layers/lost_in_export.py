"""What torch.export leaves out of the graph that it writes, without a word: gradients of one's own, and branches."""

import functools
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import function_behind, grad_mode_set_by, hooks_of, pytree, saved_tensors_pack_hook

_TORCH = Path(torch.__file__).parent
# Besides those in torch._library, for custom_op, and the like, which are operations of the graph: one of
# torch.utils.checkpoint, whose gradient is what the graph's is.
_HARMLESS = ("_NoopSaveInputs",)

_OF_VALUES = (
    "A graph has no branches that depend on values, and no sizes that do (.item(), .tolist(), nonzero(), a mask as an "
    "index): compute with tensors (torch.where), switch it off in the configuration, or write the layers by hand"
)
_OF_SAMPLES = (
    "Micro-batches have any number of samples. Usual reasons: a number of samples that forward has written down "
    "(x.view(4, -1)); an example with fewer than 2 samples in a tensor. Else write the layers by hand"
)
# What torch's error says, with what to do then. Of other errors torch's own text is all that we know.
_ADVICE = {
    "UncapturedHigherOrderOpError": (
        "torch.cond and the like are not taken: a torch.autograd.Function in a branch would lose its backward unseen. "
        "Write the layers by hand"
    ),
    "in output, which is not a known type": (
        "Have forward return tensors and plain containers only: without a cache, for a model of transformers "
        "(config.use_cache=False). Or register the class, by torch.utils._pytree.register_pytree_node"
    ),
    "data-dependent": _OF_VALUES,
    "Constraints violated": _OF_SAMPLES,
    "user-specified dim hint": _OF_SAMPLES,
}


class Branch(NamedTuple):
    """A condition on the inputs' sizes that forward has asked for, and that was true of the example.

    condition: a sympy expression over symbols that have the names in `Inputs.leaves`.
    """

    condition: Any
    where: str

    def holds(self, sizes: dict[str, int]) -> bool:
        return bool(self.condition.subs({symbol: sizes[symbol.name] for symbol in self.condition.free_symbols}))


def branches_of(placeholders: list[fx.Node]) -> tuple[Branch, ...]:
    """The branches of forward, of its submodules and of torch.nn, on sizes that may change.

    torch's operations ask for sizes, too, but are written down whole: what they do is decided again in each call.
    """
    sizes = [
        size for node in placeholders if isinstance(node.meta.get("val"), Tensor) for size in node.meta["val"].shape
    ]
    symbolic: list[Any] = [size for size in sizes if isinstance(size, torch.SymInt)]
    if not symbolic:
        return ()
    names = {str(size) for size in symbolic}
    environment = symbolic[0].node.shape_env
    found: dict[Branch, None] = {}
    for guard in environment.guards:
        condition, place = environment.simplify(guard.expr), guard.sloc.framework_loc
        bound = {symbol.name for symbol in condition.free_symbols} <= names
        if condition.free_symbols and bound and is_branch(getattr(place, "filename", None)):
            found[Branch(condition, f"{Path(place.filename).name}:{place.lineno}")] = None
    return tuple(found)


def is_branch(file: str | None) -> bool:
    """Whether what this file asks decides what is computed; what torch's operations ask is asked again in each call."""
    if file is None:
        return False
    path = Path(file)
    return not path.is_relative_to(_TORCH) or path.is_relative_to(_TORCH / "nn")


@contextmanager
def own_gradients_refused(module: nn.Module) -> Iterator[None]:
    """The body traces `module`, whose graph will have the operations of forward and their gradients, no others.

    Raises:
        PipelineError: the module has a backward of its own somewhere.
    """
    for name, part in module.named_modules():
        if hooks_of(part, "backward", "backward_pre"):
            raise _refusal(module, f"a backward hook of {name or 'the module'!r}")
    seen = _OwnGradients()

    def look(_: nn.Module, __: Any, output: Any) -> None:
        seen.functions |= dict.fromkeys(_functions_behind(output))  # also those that call nothing of torch's

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
    """In the body it sees hooks of tensors, and what runs in the forward of a torch.autograd.Function.

    Also where nothing wants a gradient yet: an input, which may come from a layer that is trained, or what is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks = 0
        self.hooks_of_saved = False
        self.functions: dict[str, None] = {}
        self._is_recorded = True  # outside of torch.no_grad()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.hooks += function is Tensor.register_hook
        for_saved = saved_tensors_pack_hook()
        if for_saved is not None:  # a builtin has no module, or None
            self.hooks_of_saved |= not str(getattr(for_saved, "__module__", None)).startswith("torch.")
        grad_mode = grad_mode_set_by(function, args)
        if grad_mode is not None:
            self._is_recorded = grad_mode
        elif self._is_recorded:
            self.functions |= dict.fromkeys(_functions_around(sys._getframe(1)))
        return function(*args, **(kwargs or {}))


def _functions_around(frame: FrameType | None) -> Iterator[str]:
    """Yield the names of the functions whose forward is running in the frame, or in one that has called it."""
    own = _own_forwards(len(torch.autograd.Function.__subclasses__()))
    while frame is not None:
        if frame.f_code in own and any(map(_may_be_trained, _arguments_of(frame))):
            yield own[frame.f_code]
        frame = frame.f_back


@functools.lru_cache(maxsize=1)
def _own_forwards(_number: int) -> dict[CodeType, str]:
    """Return the names of all functions but torch's, by the code of their forwards. _number: changes with them."""
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
        f"{type(module).__name__} cannot be split: torch.export would leave out {what}, and the pieces would train "
        "otherwise. Make it a torch.library.custom_op with register_autograd, or write the layers by hand"
    )


def not_exported(module: nn.Module, mode: str, error: Exception) -> PipelineError:
    """What to say of an error of torch.export, or of forward in it, and at which of forward's lines."""
    text = f"{type(error).__name__}: {str(error).strip()}"
    advice = next((advice for sign, advice in _ADVICE.items() if sign in text), "")
    if advice:  # which says more than torch's own, of a hundred lines
        lines = text.splitlines()
        text = " ".join(lines[: 2 if lines[0].endswith(":") else 1]).split(". ")[0]
    what = f"{text.rstrip('.: ')}{_line_of_forward(error)}" + (f". {advice}" if advice else "")
    return PipelineError(f"torch.export cannot take {type(module).__name__} in {mode} mode: {what}")


def _line_of_forward(error: Exception) -> str:
    """The innermost line of a module's method: torch names lines of its own, or ours."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        # Its first argument, which not everybody calls self.
        owner, file = _first_argument(frame), frame.f_code.co_filename
        if isinstance(owner, nn.Module) and not Path(file).is_relative_to(_TORCH):
            source = linecache.getline(file, line).strip()
            found = f" (at {Path(file).name}:{line}{f', {source}' if source else ''})"
    return found


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None
