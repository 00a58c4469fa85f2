"""Pickling of compiled and scripted functions and of custom operators, which torch does not pickle itself."""

import functools
import inspect
import io
import types
from collections.abc import Callable, Mapping
from typing import Any

# For each class in torch.ops, a function that returns the names under which torch.ops has the object.
_NAMES_OF_OPS: dict[str, Callable[[Any], list[str]]] = {
    "_OpNamespace": lambda namespace: [namespace.name],
    "OpOverloadPacket": lambda packet: str(packet).split("."),
    "OpOverload": lambda overload: [*str(overload.overloadpacket).split("."), str(overload).rpartition(".")[2]],
}


def _private_torch() -> Any:
    """Return the module `private_torch`, which imports torch: torch is in use already, or a value needs it."""
    from lp_pipe import private_torch

    return private_torch


def is_functional(tensor: Any) -> bool:
    """Return whether torch.func has wrapped the tensor, so that its memory is that of another tensor."""
    found: bool = _private_torch().is_functional(tensor)
    return found


def reduce_torch_value(obj: Any, torch: Any) -> tuple[Any, ...] | None:
    """Return how pickle rebuilds `obj`; None if torch's own pickling does."""
    kind = type(obj)
    if isinstance(obj, torch.jit.ScriptFunction | torch.jit.ScriptModule | torch.ScriptMethod):
        return _reduce_scripted(obj, torch)
    if kind.__name__ == "CustomOpDef" and kind.__module__ == "torch._library.custom_ops":
        parts = _private_torch().custom_op_parts(obj)
        return (
            None
            if parts is None
            else (_make_custom_op, parts[0], _custom_op_state(parts[1]), None, None, _fill_custom_op)
        )
    if kind.__name__ == "OptimizeContext" and kind.__module__ == "torch._dynamo.eval_frame":
        return _make_compiler, _private_torch().compiler_options(obj)
    if kind.__module__ == "torch._ops" and kind.__name__ in _NAMES_OF_OPS:
        return _find_op, (_NAMES_OF_OPS[kind.__name__](obj),)
    return None


def reduce_compiled(obj: Any) -> tuple[Any, ...] | None:
    """Return how pickle rebuilds the result of torch.compile or torch.compiler.disable; None for other objects."""
    original = vars(obj).get("_torchdynamo_orig_callable") if isinstance(obj, types.FunctionType) else None
    if original is None:
        return None
    compiler = inspect.getclosurevars(obj).nonlocals.get("self")
    if type(compiler).__name__ == "OptimizeContext":
        return _compile, (compiler, original)
    return _disable, (original,)


def _reduce_scripted(obj: Any, torch: Any) -> tuple[Any, ...]:
    if isinstance(obj, torch.ScriptMethod):
        return getattr, (obj.owner if hasattr(obj, "owner") else obj.__self__, obj.name)
    is_function = isinstance(obj, torch.jit.ScriptFunction)
    original = _private_torch().python_function_of(obj) if is_function else None
    if original is not None and any(argument.has_default_value() for argument in obj.schema.arguments):
        return _script, (original,)  # torch.jit.save loses the defaults
    stream = io.BytesIO()
    torch.jit.save(obj, stream)
    return _load_scripted, (stream.getvalue(), obj.name if is_function else None)


def _script(function: Callable[..., Any]) -> Any:
    import torch

    return torch.jit.script(function)


def _load_scripted(data: bytes, function_name: str | None) -> Any:
    import torch

    module = torch.jit.load(io.BytesIO(data))
    if function_name is None:
        return module
    return _private_torch().scripted_function(function_name, module)


def _make_compiler(backend: Any, is_full_graph: bool, is_dynamic: bool | None) -> Any:
    return _private_torch().compiler_with(backend, is_full_graph, is_dynamic)


def _compile(compiler: Any, function: Callable[..., Any]) -> Any:
    return compiler(function)


def _disable(function: Callable[..., Any]) -> Any:
    import torch

    return torch.compiler.disable(function)


def _find_op(names: list[str]) -> Any:
    import torch

    return functools.reduce(getattr, names, torch.ops)


def _custom_op_state(registered: Mapping[str, Any]) -> dict[str, Any]:
    kernels = {device: inspect.getclosurevars(inspect.unwrap(kernel)).nonlocals["fn"]
               for device, kernel in registered["kernels"].items()}  # fmt: skip
    return {**registered, "kernels": kernels}


def _make_custom_op(namespace: str, name: str, schema: str, tags: Any, function: Callable[..., Any]) -> Any:
    return _private_torch().custom_op_made_of(namespace, name, schema, tags, function)


def _fill_custom_op(op: Any, state: Mapping[str, Any]) -> None:
    parts = _private_torch().custom_op_parts(op)
    if parts is not None and parts[1]["kernels"]:  # this process had the operator already
        return
    for device, kernel in state["kernels"].items():
        op.register_kernel(device)(kernel)
    if state["fake"] is not None:
        op.register_fake(state["fake"])
    if state["vmap"] is not None:
        op.register_vmap(state["vmap"])
    backward, setup_context = state["autograd"]
    if backward is not None:
        op.register_autograd(backward, setup_context=setup_context)
