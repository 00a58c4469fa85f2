"""Values to bytes and back, by value in every launch mode, with large memory out of band.

Plain pickle (protocol 5) does the work; numpy arrays and torch tensors travel as raw buffers beside it. cloudpickle is
used only for functions and classes that the peer could not find by name: it costs ten times as much.
"""

import contextlib
import copyreg
import functools
import importlib
import io
import pickle
import sys
import threading
import types
import typing
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import cloudpickle

from lp_pipe.private_python import is_made_by_value
from lp_pipe.rpc import classes, main_module, reducers, tensor_memory, torch_values

# Smaller memory stays inside the pickle: a list of 100 000 small arrays must not become 100 000 pieces of a frame.
_OUT_OF_BAND_BYTES = 1024

_MAX_PLAIN_ITEMS = 8
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a `class` statement
_ATOMS = frozenset({int, float, bool, str, bytes, type(None), complex})


class Payload(NamedTuple):
    """A pickled value: the pickle itself, and the buffers that travel beside it, in order.

    Within one process a buffer may be any object.
    """

    body: bytes
    buffers: Sequence[Any]

    @property
    def size_bytes(self) -> int:
        """The number of bytes, without objects of the same process."""
        return len(self.body) + sum(one.nbytes if isinstance(one, memoryview) else 0 for one in self.buffers)

    def captured(self) -> "Payload":
        """Return a payload with its own copy of the memory that the buffers refer to."""
        return Payload(self.body, [bytearray(one) if isinstance(one, memoryview) else one for one in self.buffers])


class _ByValueNeeded(Exception):
    """The value holds a function or class that the peer cannot import."""


def never() -> bool:
    return False


def encode(value: Any, *, is_same_process: Callable[[], bool] = never) -> Payload:
    """Pickle `value`. Memory of arrays and tensors is referred to, not copied: send it before it changes.

    is_same_process: called only for classes and functions that the peer cannot import. True means that the peer is in
        this process, and gets them by reference among the buffers.

    Raises:
        Exception: whatever the value's own pickling raises; `pickle_errors` makes a message that names the part.
    """
    if _is_plain(value):
        return Payload(pickle.dumps(value, protocol=5), ())
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=_collect_in(buffers)).dump(value)
    except _ByValueNeeded:
        return _encode_with_references(value) if is_same_process() else encode_by_value(value)
    return Payload(stream.getvalue(), buffers)


def _encode_with_references(value: Any) -> Payload:
    stream = io.BytesIO()
    pickler = _ReferringPickler(stream)
    pickler.dump(value)
    return Payload(stream.getvalue(), pickler.buffers)


def encode_by_value(value: Any, *, new_locks: bool = False) -> Payload:
    """Pickle like `encode` a value that is full of functions anyway (a node)."""
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    pickler = _ByValuePickler(stream, _collect_in(buffers))
    pickler.makes_new_locks = new_locks
    pickler.dump(value)
    return Payload(stream.getvalue(), buffers)


def decode(body: bytes | bytearray | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Return the value; arrays and tensors use `buffers` as their memory."""
    return pickle.loads(body, buffers=buffers)


def dumps(value: Any, *, new_locks: bool = False) -> bytes:
    """Encode into one piece of bytes, for files and for values inside other messages.

    new_locks: locks, which do not pickle, become new ones.
    """
    payload = encode_by_value(value, new_locks=new_locks)
    return pickle.dumps((payload.body, [bytes(buffer) for buffer in payload.buffers]), protocol=5)


def loads(data: bytes | bytearray) -> Any:
    """Undo `dumps`."""
    body, buffers = pickle.loads(data)
    return decode(body, [bytearray(buffer) for buffer in buffers])


def dumps_in_turn(values: Sequence[Any]) -> bytes:
    """Pickle values into one piece of bytes, for `loads_in_turn`; what several of them refer to stays one object."""
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    pickler = _ByValuePickler(stream, _collect_in(buffers))
    for value in values:
        pickler.dump(value)
    return pickle.dumps((stream.getvalue(), list(map(pickle.PickleBuffer, buffers))), protocol=5)


def loads_in_turn(data: bytes | bytearray) -> Generator[Any, None, None]:
    """Undo `dumps_in_turn`; each value is loaded when the iterator is asked for it.

    A node's weights and data sets are large, so each exists only once while it is loaded: `data` is dropped, and a
    tensor gets memory that torch allocated, after which its buffer is freed. Close the iterator, which remembers every
    value.
    """
    body, buffers = pickle.loads(data)
    del data
    stream = io.BytesIO(body)
    unpickler = pickle.Unpickler(stream, buffers=_taken_from(buffers))
    while stream.tell() < len(body):
        yield _load_with_own_memory(unpickler)


def _taken_from(buffers: list[bytes | bytearray]) -> Iterator[bytearray]:
    buffers.reverse()
    while buffers:
        buffer = buffers.pop()
        yield buffer if isinstance(buffer, bytearray) else bytearray(buffer)
        del buffer


def _load_with_own_memory(unpickler: pickle.Unpickler) -> Any:
    token = _has_own_memory.set(True)
    try:
        return unpickler.load()
    finally:
        _has_own_memory.reset(token)


def fingerprint(value: Any) -> bytes:
    """Return the same bytes for equal values, also when one holds an object twice and the other holds its copy.

    `dumps` tells these two apart.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5)
    pickler.fast = True  # without the memo, which tells them apart
    try:
        pickler.dump(value)
    except (_ByValueNeeded, ValueError, RecursionError):  # the last two are raised for a cycle
        return dumps(value)
    return stream.getvalue()


def is_atomic(value: Any) -> bool:
    """Return whether the value cannot hide anything unpicklable."""
    return type(value) in _ATOMS


def _is_plain(value: Any) -> bool:
    """Return whether the value holds only atoms, as most small calls do; these are pickled faster."""
    kind = type(value)
    if kind is tuple:
        return len(value) <= _MAX_PLAIN_ITEMS and all(map(_is_plain, value))
    return kind in _ATOMS or (kind is dict and not value)


class _TensorReduction:
    """A mixin with the `reducer_override` of both picklers: tensors leave as raw buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__.startswith("torch") or hasattr(type(obj), "__torch_function__"):
            torch = sys.modules.get("torch")
            if torch is not None:
                is_tensor = isinstance(obj, torch.Tensor)
                reduced = _reduce_tensor(obj, torch) if is_tensor else torch_values.reduce_torch_value(obj, torch)
                if reduced is not None:
                    return reduced
        return NotImplemented


class _Pickler(_TensorReduction, pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__ in _NUMPY:  # most objects of a call with arrays
            return NotImplemented
        if isinstance(obj, _BY_NAME) and not _found_by_name(obj):
            raise _ByValueNeeded
        return _TensorReduction.reducer_override(self, obj)  # super() takes longer


_NUMPY = frozenset({"numpy", "numpy.dtypes"})  # the modules of numpy's own classes: arrays, numbers, dtypes
# The kinds of objects that pickle names by their module.
_BY_NAME = (type, types.FunctionType, type(functools.lru_cache(lambda: None)), typing.TypeVar)
_LOCKS: dict[type, Callable[[], Any]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
}


class _ByValuePickler(_TensorReduction, cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler for functions and classes that the peer cannot import; a peer that has them keeps its own."""

    makes_new_locks = False

    def __init__(self, stream: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        self._main_names = (
            main_module.MainGlobals()
        )  # one object, so that all functions of the script share their globals there

    def reducer_override(self, obj: Any) -> Any:
        if self.makes_new_locks and type(obj) in _LOCKS:
            return _LOCKS[type(obj)], ()
        reduced = _TensorReduction.reducer_override(self, obj)
        if reduced is not NotImplemented:
            return reduced
        is_named_kind = isinstance(obj, _BY_NAME)
        if is_named_kind and isinstance(obj.__module__, str):
            _is_importable(obj.__module__)  # makes cloudpickle ship the module's contents when it is not importable
        if not is_named_kind or not _found_by_name(obj):
            part = reducers.reduce_part(obj) or torch_values.reduce_compiled(obj)
            if part is not None:
                return _reduce_named(obj, *part) if is_named_kind else part
        if isinstance(obj, types.MethodType) and _is_inherited_class_method(obj):
            return getattr, (obj.__self__, obj.__name__)
        reduced = cloudpickle.Pickler.reducer_override(self, obj)
        if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
            return self._reduce_function(obj, *reduced)
        if is_made_by_value(reduced):
            return _reduce_class(obj, reduced)
        return reduced

    def _reduce_function(
        self, function: types.FunctionType, make: Any, arguments: Any, state: Any, *rest: Any
    ) -> tuple[Any, ...]:
        own_names = function.__globals__
        state[1]["__globals__"].update(main_module.names_in_annotations(function.__annotations__, own_names))
        if own_names is vars(sys.modules[main_module.MAIN]):
            code, _, *others = arguments
            arguments = code, self._main_names, *others
        return _reduce_named(function, make, arguments, state, *rest)


def _reduce_named(function: Any, make: Any, arguments: Any, state: Any = None, *rest: Any) -> tuple[Any, ...]:
    """Let the process that a function came from find it again, and others bind it to its name."""
    if not main_module.has_origin(function):
        return make, arguments, state, *rest
    named = function.__module__, function.__qualname__, main_module.origin_of(function), make, arguments
    if state is None:
        return main_module.rebuild_function, named
    return main_module.rebuild_function, named, (rest[-1], state), None, None, main_module.fill_function


class _ReferringPickler(_ByValuePickler):
    """A pickler for a peer in this process: it refers to classes, named functions and the globals of other functions.

    buffers: what travels beside the pickle; pickle passes each of them on, whatever it is.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        self.buffers: list[Any] = []
        self._referents: dict[int, tuple[pickle.PickleBuffer, Any]] = {}  # by the id of the stand-in
        self._collect = _collect_in(self.buffers)
        super().__init__(stream, self._take)

    def reducer_override(self, obj: Any) -> Any:
        is_function = isinstance(obj, types.FunctionType)
        has_name = main_module.is_known_by_name(obj) if is_function else isinstance(obj, _BY_NAME)
        return self._refer_to(obj) if has_name and not _found_by_name(obj) else super().reducer_override(obj)

    def _reduce_function(
        self, function: types.FunctionType, make: Any, arguments: Any, state: Any, *rest: Any
    ) -> tuple[Any, ...]:
        code, _, *others = arguments
        attributes, slots = state
        slots = {name: value for name, value in slots.items() if name not in _GLOBALS_OF_CLOUDPICKLE}
        globals_ = _Globals(self._refer_to(function.__globals__))
        return make, (code, globals_, *others), (attributes, slots), None, None, _fill_local_function

    def _refer_to(self, obj: Any) -> tuple[Any, ...]:
        stand_in = pickle.PickleBuffer(bytearray(1))
        self._referents[id(stand_in)] = stand_in, obj
        return _itself, (stand_in,)

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        if id(buffer) not in self._referents:
            return self._collect(buffer)
        self.buffers.append(self._referents[id(buffer)][1])
        return False


_GLOBALS_OF_CLOUDPICKLE = ("__globals__", "_cloudpickle_submodules")


class _Globals:
    """A stand-in for a function's globals, which pickle would take for a dict of its own."""

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def _itself(obj: Any) -> Any:
    return obj


def _fill_local_function(function: Any, state: Any) -> None:
    attributes, slots = state
    vars(function).update(attributes)
    for own, cell in zip(function.__closure__ or (), slots.pop("__closure__") or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            own.cell_contents = cell.cell_contents
    for name, value in slots.items():
        setattr(function, name, value)


def _reduce_class(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    make, arguments, *rest = classes.reduce_class(kind, reduced, lambda other: not _found_by_name(other))
    if not main_module.is_known_by_name(kind):
        return make, arguments, *rest
    state, *_, fill = rest
    annotations = vars(kind).get("__annotations__")
    names = main_module.names_in_annotations(annotations, vars(sys.modules[kind.__module__]))  # may name `kind` itself
    made_of = kind.__module__, kind.__qualname__, make, arguments
    return main_module.rebuild_class, made_of, (fill, state, names), None, None, main_module.fill_class


def _found_by_name(obj: Any) -> bool:
    """Return whether the peer gets the object by importing its module: not for `__main__`, lambdas, local classes."""
    module_name, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(module_name, str) or name is None or module_name == main_module.MAIN:
        return False
    if "<locals>" in name or "<lambda>" in name:
        return False
    if not _is_importable(module_name):
        return False
    found: Any = sys.modules.get(module_name) or importlib.import_module(module_name)  # import_module takes longer
    for part in name.split("."):
        found = getattr(found, part, None)
    # A class with another name (`types.NoneType`) is left to copyreg and pickle. A class of `builtins` without this
    # flag is Python's own; with it, code run by `exec` has made the class.
    is_builtin = module_name == "builtins" and isinstance(obj, type) and not obj.__flags__ & _HEAP_TYPE
    return found is obj or is_builtin or obj in copyreg.dispatch_table


def _is_inherited_class_method(method: types.MethodType) -> bool:
    """Return whether a class has this class method from an ancestor that the peer has: `apply` of an autograd Function.

    The function behind it may have no name of its own, and globals that do not pickle.
    """
    kind, name = method.__self__, method.__name__
    if not isinstance(kind, type) or getattr(kind, name, None) != method:
        return False
    return _found_by_name(next((ancestor for ancestor in kind.__mro__ if name in vars(ancestor)), None))


def ship_by_value(modules: Sequence[types.ModuleType]) -> None:
    """Make what these modules define travel by value from now on: some of the peers cannot import them."""
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    _is_importable.cache_clear()


def ship_by_name(modules: Sequence[types.ModuleType]) -> None:
    """Undo `ship_by_value`."""
    for module in modules:
        with contextlib.suppress(ValueError):
            cloudpickle.unregister_pickle_by_value(module)
    _is_importable.cache_clear()


@functools.cache
def _is_importable(module_name: str) -> bool:
    """Return whether another process with this sys.path finds the module; if not, its contents travel by value.

    Modules without a place on sys.path are those that pytest or a notebook made, and files loaded by path.
    """
    if module_name in cloudpickle.list_registry_pickle_by_value():
        return False
    module = sys.modules.get(module_name)
    path: Any = None
    name = ""
    for part in module_name.split("."):
        name = f"{name}.{part}" if name else part
        spec = _find_spec(name, path)
        if spec is None:
            if module is not None and module_name != "__main__":
                cloudpickle.register_pickle_by_value(module)
            return False
        path = spec.submodule_search_locations
        if spec.origin is None and path is not None:
            # a namespace package has no code to run, and knows its path only once imported
            importlib.import_module(name)
    return True


def _find_spec(name: str, path: Any) -> Any:
    # Not importlib.util.find_spec, which believes sys.modules and so whatever was put there by hand.
    for finder in sys.meta_path:
        if not hasattr(finder, "find_spec"):  # a finder of Python 2's kind, which Python's own import skips as well
            continue
        try:
            spec = finder.find_spec(name, path)
        except ValueError:  # an entry of sys.path is no path, and nothing before it has the module
            continue
        if spec is not None:
            return spec
    return None


def _reduce_tensor(tensor: Any, torch: Any) -> tuple[Any, ...] | None:
    """Return how to rebuild a tensor from raw bytes, without the rest of the storage that a view may belong to.

    Attributes are set afterwards, as they may lead back to the tensor.

    None leaves tensors of unusual kinds (sparse, quantized, nested, subclasses, other devices) to torch's own pickling.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    if tensor.is_mkldnn:
        return _rebuild_mkldnn, (tensor.detach().to_dense(),)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    if torch_values.is_functional(tensor):  # the memory that it shows is not its own
        return None
    try:
        core = tensor_memory.without_repeats(tensor.detach().resolve_conj().resolve_neg())
        plain = core.contiguous()
        # PickleBuffer keeps the numpy view, and with it the tensor's memory, alive until it is sent. Not reshape(-1): a
        # single element may have any stride and counts as contiguous, but cannot be viewed as bytes.
        flat = plain.as_strided((plain.numel(),), (1,))
        raw = pickle.PickleBuffer(flat.view(torch.uint8).numpy()) if plain.numel() else b""
    except RuntimeError:  # it has no memory of its own: zeros that are not allocated, a tensor inside torch.vmap
        return None
    is_parameter = type(tensor) is torch.nn.Parameter
    dtype = str(plain.dtype).removeprefix("torch.")
    place = (
        tuple(core.shape),
        tensor_memory.strides_to_keep(core),
        tuple(tensor.shape),
        tensor_memory.offset_in_line(core, of_storage=True),
    )
    rebuilt = _rebuild_tensor, (raw, dtype, place, tensor.requires_grad, is_parameter)
    attributes = vars(tensor)
    return (*rebuilt, attributes, None, None, _set_attributes) if attributes else rebuilt


def _rebuild_mkldnn(dense: Any) -> Any:
    return dense.to_mkldnn()


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


_has_own_memory: ContextVar[bool] = ContextVar("lp_pipe_has_own_memory", default=False)


def _rebuild_tensor(raw: Any, dtype: str, place: tuple[Any, ...], requires_grad: bool, is_parameter: bool) -> Any:
    """Rebuild a tensor from its raw bytes.

    place: shape of what travelled, its strides (None: contiguous), the shape to which it is expanded, and its offset in
        a cache line.
    """
    import torch

    kind = getattr(torch, dtype)
    shape, stride, expanded_shape, offset = place
    is_empty = not len(raw)
    tensor = (
        torch.empty(shape, dtype=kind, device="cpu") if is_empty else torch.frombuffer(raw, dtype=kind).reshape(shape)
    )
    if offset:
        tensor = tensor_memory.copy_with_layout(tensor, stride or tensor.stride(), offset)
    elif stride is not None:
        tensor = torch.empty_strided(shape, stride, dtype=kind, device="cpu").copy_(tensor)
    elif _has_own_memory.get():
        tensor = tensor.clone()
    if _has_own_memory.get() and isinstance(raw, bytearray):
        raw.clear()  # the unpickler's memo keeps the object until everything is loaded
    if expanded_shape != shape:
        tensor = tensor.expand(expanded_shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _collect_in(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a `buffer_callback` that takes large memory out of the pickle; a True from it leaves memory in."""

    def collect(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    return collect


_handles_seen: ContextVar[list[Any] | None] = ContextVar("lp_pipe_handles_seen", default=None)


@contextlib.contextmanager
def collecting_handles() -> Iterator[list[Any]]:
    """Collect every handle that is pickled in the body, also those hidden in closures and attributes."""
    seen: list[Any] = []
    token = _handles_seen.set(seen)
    try:
        yield seen
    finally:
        _handles_seen.reset(token)


def note_handle(handle: Any) -> None:
    """Record a handle that is being pickled."""
    seen = _handles_seen.get()
    if seen is not None:
        seen.append(handle)
