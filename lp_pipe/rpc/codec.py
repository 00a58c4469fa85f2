"""Values to bytes and back: by value in every launch mode, large memory out of band.

Plain pickle (protocol 5) does the work; numpy arrays and torch tensors travel as raw buffers beside it. cloudpickle
steps in only for functions and classes that the peer could not find by name: it costs ten times as much.
"""

import contextlib
import copyreg
import functools
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import cloudpickle

from lp_pipe.rpc import layout, namesakes, slotted

# Smaller memory stays inside the pickle: a list of 100 000 little arrays must not become 100 000 pieces of a frame.
_OUT_OF_BAND_BYTES = 1024

_MAX_PLAIN_ITEMS = 8
_ATOMS = frozenset({int, float, bool, str, bytes, type(None), complex})


class Payload(NamedTuple):
    """A pickled value: the pickle itself, and the buffers that belong beside it, in order."""

    body: bytes
    buffers: Sequence[Any]


class _ByValueNeeded(Exception):
    """A function or class came up that the peer cannot import."""


def encode(value: Any) -> Payload:
    """Pickle `value`; memory of arrays and tensors is referred to, not copied, so send it before it changes.

    Raises:
        Exception: whatever the value's own pickling raises; see `explain` for a message that names the culprit.
    """
    if _is_plain(value):
        return Payload(pickle.dumps(value, protocol=5), ())
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=_collect_in(buffers)).dump(value)
    except _ByValueNeeded:
        return encode_by_value(value)
    return Payload(stream.getvalue(), buffers)


def encode_by_value(value: Any) -> Payload:
    """Like `encode`, for values that are full of functions anyway (nodes)."""
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    _ByValuePickler(stream, protocol=5, buffer_callback=_collect_in(buffers)).dump(value)
    return Payload(stream.getvalue(), buffers)


def decode(body: bytes | bytearray | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """The value again; arrays and tensors use `buffers` as their memory."""
    return pickle.loads(body, buffers=buffers)


def dumps(value: Any) -> bytes:
    """`encode` into one piece of bytes, for files and for values inside other messages."""
    payload = encode_by_value(value)
    return pickle.dumps((payload.body, [bytes(buffer) for buffer in payload.buffers]), protocol=5)


def loads(data: bytes | bytearray) -> Any:
    """Undo `dumps`."""
    body, buffers = pickle.loads(data)
    return decode(body, [bytearray(buffer) for buffer in buffers])


def dumps_in_turn(values: Sequence[Any]) -> bytes:
    """Pickle values into one piece of bytes, for `loads_in_turn`; what several of them refer to stays one object."""
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    pickler = _ByValuePickler(stream, protocol=5, buffer_callback=_collect_in(buffers))
    for value in values:
        pickler.dump(value)
    return pickle.dumps((stream.getvalue(), [bytes(buffer) for buffer in buffers]), protocol=5)


def loads_in_turn(data: bytes | bytearray) -> Iterator[Any]:
    """Undo `dumps_in_turn`; each value is loaded when the iterator is asked for it."""
    body, buffers = pickle.loads(data)
    stream = io.BytesIO(body)
    unpickler = pickle.Unpickler(stream, buffers=map(bytearray, buffers))
    while stream.tell() < len(body):
        yield unpickler.load()


def fingerprint(value: Any) -> bytes:
    """The same bytes for equal values; unlike `dumps`, also when one holds an object twice and the other its copy."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5)
    pickler.fast = True  # without the memo, which tells those apart
    try:
        pickler.dump(value)
    except (_ByValueNeeded, ValueError, RecursionError):  # the last two: a cycle
        return dumps(value)
    return stream.getvalue()


def is_atomic(value: Any) -> bool:
    """True for values that cannot hide anything unpicklable."""
    return type(value) in _ATOMS


def _is_plain(value: Any) -> bool:
    """Whether the pickler would meet nothing but atoms: true of most small calls, which are then pickled faster."""
    kind = type(value)
    if kind is tuple:
        return len(value) <= _MAX_PLAIN_ITEMS and all(map(_is_plain, value))
    return kind in _ATOMS or (kind is dict and not value)


class _TensorReduction:
    """`reducer_override` for both picklers: tensors leave as raw buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__.startswith("torch") or hasattr(type(obj), "__torch_function__"):
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(obj, torch.Tensor):
                reduced = _reduce_tensor(obj, torch)
                if reduced is not None:
                    return reduced
        return NotImplemented


_Cached: Any = type(functools.lru_cache(lambda: None))  # what @functools.lru_cache makes of a function


class _Pickler(_TensorReduction, pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType, _Cached)) and not _found_by_name(obj):
            raise _ByValueNeeded
        return super().reducer_override(obj)


class _ByValuePickler(_TensorReduction, cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduced = _TensorReduction.reducer_override(self, obj)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(obj, (type, types.FunctionType)):
            _is_importable(obj.__module__)  # makes cloudpickle ship the module's contents when it is not
        elif isinstance(obj, _Cached) and not _found_by_name(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        reduced = cloudpickle.Pickler.reducer_override(self, obj)
        if not isinstance(reduced, tuple) or not isinstance(obj, (type, types.FunctionType)):
            return reduced
        if isinstance(obj, type):
            reduced = slotted.with_slots(obj, reduced)
        if namesakes.is_known_by_name(obj):
            make, arguments, *rest = reduced
            return namesakes.rebuild, (obj.__module__, obj.__qualname__, make, arguments), *rest
        return reduced


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _found_by_name(obj: Any) -> bool:
    """Whether the peer gets the same object by importing its module: not for `__main__`, lambdas, local classes."""
    module_name, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if module_name is None or name is None or module_name == "__main__" or "<locals>" in name or "<lambda>" in name:
        return False
    if not _is_importable(module_name):
        return False
    found: Any = importlib.import_module(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    # A class that goes by another name (`types.NoneType`) is copyreg's or pickle's business.
    return found is obj or obj in copyreg.dispatch_table or module_name == "builtins"


def ship_by_value(modules: Sequence[types.ModuleType]) -> None:
    """From now on what these define travels by value: some of the peers cannot import them."""
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
    """Whether another process with this sys.path finds the module; if not, its contents travel by value.

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
            importlib.import_module(name)  # a namespace package: has no code to run, and tells its path only then
    return True


def _find_spec(name: str, path: Any) -> Any:
    # Not importlib.util.find_spec: that believes sys.modules, and so whatever was put there by hand.
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _reduce_tensor(tensor: Any, torch: Any) -> tuple[Any, ...] | None:
    """Rebuild from raw bytes, without the rest of the storage that a view may belong to.

    Attributes come afterwards, as they may lead back to the tensor.

    None leaves tensors of unusual kinds (sparse, quantized, subclasses, other devices) to torch's own pickling.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.device.type != "cpu" or tensor.is_quantized:
        return None
    core = layout.without_repeats(tensor.detach().resolve_conj().resolve_neg())
    plain = core.contiguous()
    # PickleBuffer keeps the numpy view, and with it the tensor's memory, alive until it was sent.
    # Not reshape(-1): one element may have any stride and counts as contiguous, but cannot be viewed as bytes.
    flat = plain.as_strided((plain.numel(),), (1,))
    raw = pickle.PickleBuffer(flat.view(torch.uint8).numpy()) if plain.numel() else b""
    is_parameter = type(tensor) is torch.nn.Parameter
    dtype = str(plain.dtype).removeprefix("torch.")
    place = (
        tuple(core.shape),
        layout.kept_stride(core),
        tuple(tensor.shape),
        layout.offset_in_line(core, of_storage=True),
    )
    rebuilt = _rebuild_tensor, (raw, dtype, place, tensor.requires_grad, is_parameter)
    attributes = vars(tensor)
    return (*rebuilt, attributes, None, None, _set_attributes) if attributes else rebuilt


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def _rebuild_tensor(raw: Any, dtype: str, place: tuple[Any, ...], requires_grad: bool, is_parameter: bool) -> Any:
    """place: shape of what travelled, its strides (None: contiguous), the shape to which it is expanded, and its offset
    in a cache line.
    """
    import torch

    kind = getattr(torch, dtype)
    shape, stride, expanded_shape, offset = place
    is_empty = not len(raw)
    tensor = (
        torch.empty(shape, dtype=kind, device="cpu") if is_empty else torch.frombuffer(raw, dtype=kind).reshape(shape)
    )
    if offset:
        tensor = layout.placed(tensor, stride or tensor.stride(), offset)
    elif stride is not None:
        tensor = torch.empty_strided(shape, stride, dtype=kind, device="cpu").copy_(tensor)
    if expanded_shape != shape:
        tensor = tensor.expand(expanded_shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _collect_in(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """A `buffer_callback` that takes large memory out of the pickle; True leaves it in."""

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
    """Called by a handle that is being pickled."""
    seen = _handles_seen.get()
    if seen is not None:
        seen.append(handle)
