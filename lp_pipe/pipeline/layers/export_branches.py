"""Decisions that torch.export takes once, by the example: branches on sizes, and on dtypes."""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import (
    dtype_notes,
    note_dtype,
)

_TORCH = Path(torch.__file__).parent


class Branch(NamedTuple):
    """A condition on the inputs' sizes that forward has asked for, and that was true of the example.

    condition: a sympy expression over symbols that have the names in `Inputs.leaves`.
    """

    condition: Any
    where: str

    def holds(self, sizes: dict[str, int]) -> bool:
        return bool(self.condition.subs({symbol: sizes[symbol.name] for symbol in self.condition.free_symbols}))


def branches_of(placeholders: list[fx.Node]) -> tuple[Branch, ...]:
    """Return the branches on sizes that may change, of forward, of its submodules and of torch.nn.

    torch's operations ask for sizes too, but they are in the graph as a whole and decide again in each call.
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
    """Return whether a question from this file decides what is computed.

    torch's operations ask again in each call.
    """
    if file is None:
        return False
    path = Path(file)
    return not path.is_relative_to(_TORCH) or path.is_relative_to(_TORCH / "nn")


_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_AS_ANOTHER = (Tensor.to, Tensor.type_as)


class AskedDtypes(TorchFunctionMode):
    """A mode in which torch.export notes in its graph what forward learns about dtypes of floating-point tensors.

    torch.export writes down the answers for the example, but autocast may give others.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = args[0] if function == _DTYPE else _other(args) if function in _AS_ANOTHER else None
        if asked is not None and asked.is_floating_point() and is_branch(_file_of_caller()):
            note_dtype(asked)
        return function(*args, **(kwargs or {}))


def check_as_asked(root: fx.GraphModule) -> None:
    """Turn each note in the graph, and those of torch.export at conversions, into a check that names its line.

    A conversion that changed nothing gave forward the same tensor, and the graph uses its result for both.
    """
    for module in (module for module in root.modules() if isinstance(module, fx.GraphModule)):
        # nodes with a known dtype: parameters, and inputs of the batch
        known = ("get_attr", "placeholder") if module is root else ("get_attr",)
        for note in dtype_notes(module.graph):
            asked, dtype = note.args[0], _noted(note)
            if dtype is not None and asked.op not in known:
                with module.graph.inserting_before(note):
                    module.graph.call_function(refuse_other_dtype, (asked, dtype, _line_of(note)))
            module.graph.erase_node(note)
        module.recompile()


def refuse_other_dtype(tensor: Tensor, dtype: torch.dtype, where: str) -> None:
    """Refuse a tensor of another dtype than the example's, on which forward depends.

    Raises:
        PipelineError: the error names the line of forward, and both dtypes.
    """
    if tensor.dtype != dtype:
        precision = tensor.dtype if tensor.dtype != torch.float32 else dtype
        under = "without" if tensor.dtype == torch.float32 else "under"
        raise PipelineError(
            f"{where} asks for the dtype of a tensor, or converts it: it was {dtype} when the module was split and is "
            f"{tensor.dtype} in this pipeline, with which the module would compute something else: call pp.split() "
            f"{under} torch.autocast(device_type, {precision})"
        )


def _other(args: tuple[Any, ...]) -> Tensor | None:
    return args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None


def _file_of_caller() -> str:
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__":  # skip the modes of torch.export
        frame = frame.f_back
    return str(frame.f_code.co_filename)


def _noted(note: fx.Node) -> torch.dtype | None:
    if not note.kwargs:
        return note.args[-1]  # type: ignore[return-value]
    dtype, result = note.kwargs["dtype"], note.next.meta.get("val")
    is_same = dtype.is_floating_point and isinstance(result, Tensor) and result.dtype == dtype  # type: ignore[union-attr]
    return dtype if is_same else None  # type: ignore[return-value]


def _line_of(node: fx.Node) -> str:
    frames = re.findall(r'File "(.*)", line (\d+)', node.stack_trace or "")
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else "forward"
