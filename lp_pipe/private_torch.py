"""Every private part of torch that lp_pipe uses, each with what replaces it in a torch that lacks it.

A name with a leading underscore may be gone with any release of torch, so no other module of lp_pipe uses one
(tests/test_private_torch.py checks that). Each function below looks the name up when it is called, with `getattr` and a
default. Where the name is gone ("Lost"), public functions of torch do the same more slowly, or a check is left out, and
the training goes on. The tests take each name away in turn and train.

This module imports torch, so only modules that need torch import it.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.variable import Variable

from lp_pipe.torch_version import is_tested

try:
    from torch.utils import _pytree
except ImportError:  # torch plans a public module of this name
    from torch.utils import pytree as _pytree  # type: ignore[attr-defined, no-redef]
try:
    from torch.utils import _python_dispatch
except ImportError:
    _python_dispatch = None  # type: ignore[assignment]

pytree = _pytree
_IS_TESTED = is_tested(torch.__version__)
_PUBLIC_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_PUBLIC_NORMS += (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # type: ignore[assignment]

_LOST = object()

_HOOKS = {
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "backward_pre": "_backward_pre_hooks",
    "backward": "_backward_hooks",
    "post_accumulate_grad": "_post_accumulate_grad_hooks",
}


class _NoDispatchMode:
    """A context in which torch does not call `__torch_dispatch__`."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...


# The base class of a context in which torch calls `__torch_dispatch__` in place of each operation. Lost: it does not,
# and what would be counted there stays 0.
DispatchMode: Any = getattr(_python_dispatch, "TorchDispatchMode", _NoDispatchMode)


# ---- modules ----


def buffers_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return the module's own buffers by name, without those of its submodules; later changes show in the result."""
    found: Mapping[str, Tensor | None] | None = getattr(module, "_buffers", None)
    return dict(module.named_buffers(recurse=False, remove_duplicate=False)) if found is None else found


def put_buffer(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Set the module's buffer, past the `__setattr__` of the module's class."""
    _put(getattr(module, "_buffers", None), module, name, value)


def parameters_of(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """Return the module's own parameters by name, without those of its submodules."""
    found: Mapping[str, nn.Parameter | None] | None = getattr(module, "_parameters", None)
    return dict(module.named_parameters(recurse=False, remove_duplicate=False)) if found is None else found


def put_parameter(module: nn.Module, name: str, value: nn.Parameter) -> None:
    """Set the module's parameter, past the `__setattr__` of the module's class."""
    _put(getattr(module, "_parameters", None), module, name, value)


def _put(where: MutableMapping[str, Any] | None, module: nn.Module, name: str, value: Tensor | None) -> None:
    if where is None:
        setattr(module, name, value)
    else:
        where[name] = value


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's own parameters by name; `before_read` is called with each one that is about to be read."""

    before_read: Callable[[nn.Parameter], None]

    def __getitem__(self, name: str) -> nn.Parameter | None:
        found = super().__getitem__(name)
        if found is not None:
            self.before_read(found)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        found = super().get(name, default)
        if found is not None and found is not default:
            self.before_read(found)
        return found

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)  # a copy of the module is not watched


def watch_parameters(module: nn.Module, before_read: Callable[[nn.Parameter], None]) -> bool:
    """Call `before_read` before parameters are read through the module; return whether it will be. Lost: False."""
    own = getattr(module, "_parameters", None)
    if type(own) is not dict or hasattr(module, "_orig_mod"):  # a compiled module's code reads its own copy
        return False
    watched = WatchedParameters(own)
    watched.before_read = before_read
    module.__dict__["_parameters"] = watched
    return True


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that are not saved. Lost: none."""
    found: set[str] = getattr(module, "_non_persistent_buffers_set", set())
    return found


def hooks_of(owner: nn.Module | Tensor, *kinds: str) -> list[Callable[..., Any]]:
    """Return the hooks of these kinds, in order. Lost: none, so that a hook is neither refused nor copied.

    kinds: keys of `_HOOKS`.
    """
    return [hook for kind in kinds for hook in (getattr(owner, _HOOKS[kind], None) or {}).values()]


def has_node_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks of `register_backward_hook`, which torch keeps at a node. Lost: no."""
    return bool(hooks_of(module, "backward")) and not getattr(module, "_is_full_backward_hook", True)


def state_version_of(module: nn.Module) -> int:
    """Return the version of the module's format of state_dict. Lost: 1, torch's default."""
    version: int = getattr(module, "_version", 1)
    return version


def set_state_version(module: nn.Module, version: int) -> None:
    module._version = version


def reads_own_state(module: nn.Module) -> bool:
    """Return whether the module's class has its own way of reading a state_dict. Lost: no."""
    usual = getattr(nn.Module, "_load_from_state_dict", None)
    return getattr(type(module), "_load_from_state_dict", usual) is not usual


def errors_of_reading(module: nn.Module, state: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Return the module's errors about these values of its own tensors; the module then has the values."""
    errors: list[str] = []
    getattr(module, "_load_from_state_dict", lambda *_: None)(state, prefix, {}, False, [], [], errors)
    return errors


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether the module keeps running statistics as BatchNorm and InstanceNorm do."""
    return isinstance(module, getattr(nn.modules.batchnorm, "_NormBase", _PUBLIC_NORMS))


# ---- tensors ----


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor was written to in place. Lost: 0, so that no write is noticed by its number."""
    version: int = getattr(tensor, "_version", 0)
    return version


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which this one is a view, or itself. Lost: itself."""
    base: Tensor | None = getattr(tensor, "_base", None)
    return tensor if base is None else base


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return `version_of` each of the tensors, without a call for each."""
    return [getattr(tensor, "_version", 0) for tensor in tensors]


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd knows the tensor as a view of another one. Lost: no."""
    found: bool = getattr(tensor, "_is_view", bool)()
    return found


def negative_view(tensor: Tensor) -> Tensor:
    """Return the tensor's negative, in the same memory where torch can."""
    negative: Tensor = getattr(torch, "_neg_view", torch.neg)(tensor)
    return negative


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the numbers of a sparse COO tensor, to be read or written; several may belong to one place."""
    values = getattr(tensor, "_values", None)
    found: Tensor = _coalesced_in_place(tensor).values() if values is None else values()
    return found


def sparse_indices(tensor: Tensor) -> Tensor:
    """Return the places of `sparse_values`."""
    indices = getattr(tensor, "_indices", None)
    found: Tensor = _coalesced_in_place(tensor).indices() if indices is None else indices()
    return found


def _coalesced_in_place(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor if tensor.is_coalesced() else tensor.copy_(tensor.coalesce())


def parameter_like(parameter: nn.Parameter, weights: Tensor) -> nn.Parameter:
    """Return a parameter of the same class with other weights, made without a call of the class."""
    make = getattr(Tensor, "_make_subclass", None)
    if make is None:
        return weights.detach().as_subclass(type(parameter)).requires_grad_()  # type: ignore[return-value]
    made: nn.Parameter = make(type(parameter), weights, require_grad=True)
    return made


def address_of_storage(storage: UntypedStorage) -> int:
    """Return a number that no other living storage has. Lost: the data's address, which empty storages share."""
    address: int = getattr(storage, "_cdata", None) or storage.data_ptr()
    return address


def norms_of_each(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor."""
    at_once = getattr(torch, "_foreach_norm", None)
    found: Sequence[Tensor] = [torch.linalg.vector_norm(x) for x in tensors] if at_once is None else at_once(tensors)
    return found


def grouped_by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each dtype, with the dtypes in the order that torch's functions use.

    Lost: the dtypes are in the order in which they first occur.
    """
    private = getattr(torch.utils, "_foreach_utils", None)
    group = getattr(private, "_group_tensors_by_device_and_dtype", None)
    if group is not None:
        return [indices for _, indices in group([list(tensors)], with_indices=True).values()]
    found: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(position)
    return list(found.values())


def unscale_in_place(tensors: list[Tensor], not_finite: Tensor, inverse: Tensor) -> None:
    """Multiply tensors of one dtype and device in place; add to `not_finite` if one is infinite or NaN."""
    at_once = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
    if at_once is not None:
        at_once(tensors, not_finite, inverse)
        return
    for tensor in tensors:
        not_finite += (~tensor.isfinite()).any()
        tensor.mul_(inverse)


# ---- training ----


def run_backward(
    roots: Sequence[Any],
    gradients: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    inputs: tuple[Any, ...] = (),
) -> None:
    """Run torch.autograd.backward without its checks of the arguments, which take longer than a small stage's backward.

    roots: tensors, and their places in the graph (GradientEdge).
    inputs: the only leaves that get gradients, or their places; if empty, all leaves do.
    """
    run = _engine_for(gradients) if _IS_TESTED else None  # another version may take other arguments
    if run is None:
        summed = tuple(map(_summed, roots, gradients))
        torch.autograd.backward(tuple(roots), summed, retain_graph=retain_graph, inputs=inputs or None)
    else:
        # By position: edges, gradients, retain_graph, create_graph, inputs.
        run(tuple(roots), tuple(gradients), retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=True)


def _summed(root: Any, gradient: Tensor) -> Tensor:
    """Return the gradient in the shape of the root, which may be smaller because it was broadcast.

    torch's engine sums such a gradient itself, but torch.autograd.backward refuses it.
    """
    try:
        shape = root.node._input_metadata[root.output_nr].shape
    except AttributeError:  # a tensor, or a torch that describes edges in another way
        return gradient
    return gradient.sum_to_size(shape)


def sequence_number_of(node: Any) -> int:
    """Return when the forward made this node of its graph; autograd runs later ones first. Lost: 0 for all."""
    number: int = getattr(node, "_sequence_nr", int)()
    return number


def _engine_for(gradients: Sequence[Tensor]) -> Callable[..., Any] | None:
    """Return torch's engine for the gradients' device.

    The one for GPUs comes with the context that autograd's threads read; on the CPU there are no such threads.
    """
    if any([gradient.is_cuda for gradient in gradients]):
        return getattr(torch.autograd.graph, "_engine_run_backward", None)
    return getattr(getattr(Variable, "_execution_engine", None), "run_backward", None)


def schedulers_in(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that a ChainedScheduler or SequentialLR is made of. Lost, or for any other: none."""
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found


# ---- torch.export ----


def note_dtype(tensor: Tensor) -> None:
    """Make torch.export note in its graph that the tensor had its dtype. Lost: it does not."""
    note = _dtype_note()
    if note is not None:
        note(tensor, dtype=tensor.dtype)


def dtype_notes(graph: Any) -> Sequence[Any]:
    """Return the notes in the graph: those of `note_dtype`, and torch.export's own."""
    note = _dtype_note()
    return graph.find_nodes(op="call_function", target=note) if note is not None else ()


def _dtype_note() -> Callable[..., Any] | None:
    return getattr(getattr(torch.ops.aten, "_assert_tensor_metadata", None), "default", None)


def grad_mode_set_by(function: Any, args: tuple[Any, ...]) -> bool | None:
    """Return the grad mode that a call seen by a TorchFunctionMode sets; None for any other call."""
    setter = getattr(torch._C, "_set_grad_enabled", None)
    return bool(args[0]) if setter is not None and function is setter else None


def saved_tensors_pack_hook() -> Callable[..., Any] | None:
    """Return the pack hook of the innermost torch.autograd.graph.saved_tensors_hooks. Lost, or without one: None."""
    top = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    hooks = top(True) if top is not None else None
    return hooks[0] if hooks is not None else None


def is_pipe_split(operation: Any) -> bool:
    """Return whether an operation of a graph is the mark of torch.distributed.pipelining.pipe_split()."""
    return "pipe_split" in str(operation)


def function_behind(node: Any) -> type[torch.autograd.Function] | None:
    """Return the class with the backward that a node of the graph runs. Lost, or if it is torch's own in C++: None."""
    return getattr(node, "_forward_cls", None)


def schema_arguments(operation: Any) -> Sequence[Any]:
    """Return an operation's arguments as its schema describes them. Lost, or for other objects: none."""
    schema = getattr(operation, "_schema", None)
    return schema.arguments if schema is not None else ()


def defining_module(operation: Any) -> str | None:
    """Return the name of the module that has defined a torch.library.custom_op; None for all others.

    Lost: None, so that a stage finds the operation only if the model's own module defines it.
    """
    if not isinstance(operation, type(torch.ops.aten.add.Tensor)):
        return None
    known = getattr(getattr(getattr(torch, "_library", None), "custom_ops", None), "OPDEFS", {})
    function = getattr(known.get(operation.name().partition(".")[0]), "_init_fn", None)
    return function.__module__ if function is not None else None


# ---- values that travel ----


def is_functional(tensor: Tensor) -> bool:
    """Return whether the tensor stands for another one in a functionalized program. Lost: no."""
    found: bool = getattr(torch, "_is_functional_tensor", lambda _: False)(tensor)
    return found


def custom_op_parts(operation: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return what a torch.library.custom_op is made of, and what was registered with it.

    Lost: None, so that it does not travel.
    """
    made_of = ("_namespace", "_name", "_schema", "_tags", "_init_fn")
    registered = ("_backend_fns", "_abstract_fn", "_vmap_fn", "_backward_fn", "_setup_context_fn")
    found = [getattr(operation, name, _LOST) for name in (*made_of, *registered)]
    if _LOST in found:
        return None
    kernels, fake, vmap, *autograd = found[len(made_of) :]
    return tuple(found[: len(made_of)]), {"kernels": kernels, "fake": fake, "vmap": vmap, "autograd": tuple(autograd)}


def custom_op_made_of(namespace: str, name: str, schema: str, tags: Any, function: Callable[..., Any]) -> Any:
    """Return this process's torch.library.custom_op of this name; make one if there is none."""
    custom_ops = importlib.import_module("torch._library.custom_ops")
    known = custom_ops.OPDEFS.get(f"{namespace}::{name}")
    return custom_ops.CustomOpDef(namespace, name, schema, function, tags) if known is None else known


def compiler_options(compiler: Any) -> tuple[Any, bool, bool | None]:
    """Return the backend of torch.compile, whether it compiles whole functions, and whether shapes may vary.

    Lost: the backend is torch's own, and torch finds out whether shapes vary.
    """
    backend: Any = getattr(compiler, "callback", "inductor")
    while (wrapped := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = wrapped
    is_full_graph = bool(getattr(compiler, "fullgraph", False) or getattr(compiler, "error_on_graph_break", False))
    return backend, is_full_graph, getattr(compiler, "_dynamic", None)


def compiler_with(backend: Any, is_full_graph: bool, is_dynamic: bool | None) -> Any:
    """Return a compiler with these options. Lost: torch.compile, which wraps the backend once more."""
    optimize = getattr(getattr(torch, "_dynamo", None), "optimize", None)
    if optimize is None:
        return torch.compile(backend=backend, fullgraph=is_full_graph, dynamic=is_dynamic)
    return optimize(backend, nopython=is_full_graph, dynamic=is_dynamic)


def python_function_of(scripted: Any) -> Callable[..., Any] | None:
    """Return the function that torch.jit.script has read. Lost, or if it was traced: None."""
    return getattr(scripted, "_torchdynamo_inline", None)


def scripted_function(name: str, module: Any) -> Any:
    """Return the function in the module that torch.jit.save has put around it. Lost: the module, called alike."""
    make = getattr(torch._C, "_create_function_from_graph", None)
    if make is None:
        return module
    graph = module.forward.graph.copy()
    graph.eraseInput(0)
    return make(name, graph)


# ---- settings ----


def default_device() -> str | None:
    """Return the device as the script has named it: torch.get_default_device would begin to use "cuda".

    Lost: None, so that nodes have torch's default.
    """
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return None if context is None else str(context.device)


def print_options() -> dict[str, Any]:
    """Return the options of torch.set_printoptions. Lost: none."""
    options = getattr(getattr(torch, "_tensor_str", None), "PRINT_OPTS", None)
    return dict(vars(options)) if options is not None else {}


def validates_distributions() -> bool:
    """Return the default of `validate_args` of torch.distributions. Lost: torch's own.

    torch's compiler turns it off, and patches the tracer too: where it has, the value is not the script's.
    """
    if hasattr(torch.fx.Tracer.trace, "_torchdynamo_disable"):
        return __debug__
    found: bool = getattr(torch.distributions.Distribution, "_validate_args", __debug__)
    return found


# ---- torch.distributed ----


def gloo_group(group_class: Any, store: Any, rank: int, address: str, patience: timedelta, size: int = 2) -> Any:
    """Return gloo's group of `size` ranks, reached at this host's address. Lost: at the address that gloo chooses."""
    options_class = getattr(group_class, "_Options", None)
    if options_class is None:
        return group_class(store, rank, size, patience)
    options = options_class()
    options._devices = [group_class.create_device(hostname=address)]
    options._timeout = patience
    return group_class(store, rank, size, options)


def finished_work(result: Any) -> Any:
    """Return the Work of an operation of torch.distributed that has ended, with its result."""
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    devices = {leaf.device for leaf in leaves if leaf.device.type != "cpu"}
    done: torch.futures.Future[Any] = torch.futures.Future(devices=sorted(devices, key=str))
    done.set_result(result)
    return c10d._create_work_from_future(done)


class _Place(NamedTuple):
    """The location of an entry of a checkpoint: torch's _StorageInfo, in a torch that has none."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None  # compression, which lp_pipe does not use


def storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Return the location of an entry of a Distributed Checkpoint. Lost: as a class that only lp_pipe reads."""
    filesystem = importlib.import_module("torch.distributed.checkpoint.filesystem")
    return getattr(filesystem, "_StorageInfo", _Place)(relative_path, offset, length)


# ---- CUDA IPC ----


def release_ipc_counter(file: bytes, place: int) -> None:
    """Count down the uses of a GPU's memory that this process has shared. Lost: a dead process's use stays counted."""
    release = getattr(UntypedStorage, "_release_ipc_counter_cuda", None)
    if release is not None:
        release(file, place)
