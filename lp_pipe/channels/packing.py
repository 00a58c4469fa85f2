"""A value as a layout and its tensors. The layout is everything but the tensors' bytes, and rarely changes."""

import itertools
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.channels import packing
from lp_pipe.channels.sendable import check_sendable
from lp_pipe.private_torch import negative_view, pytree
from lp_pipe.rpc import codec
from lp_pipe.rpc import tensor_memory as layout_of_memory
from lp_pipe.rpc.tensor_memory import offset_in_line

CPU = torch.device("cpu")
_ALIGNMENT_BYTES = layout_of_memory.LINE_BYTES

# Immutable leaves, which values may share. Equal ones are equal on the wire, too, unlike 0.0 and -0.0.
CONSTANTS = frozenset({bool, int, str, type(None)})


class TensorSpec(NamedTuple):
    """A tensor without its elements; `stride` is dense, that of the tensor's clone()."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_on_gpu: bool = False  # on which GPU is each end's own choice

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Geometry(NamedTuple):
    """The place in memory of a tensor that was sliced or expanded; the bytes that travel are dense.

    Kernels sum in another order over another layout. So the receiver restores it: `stride` with its gaps (None: dense),
    then `shape`, to which dimensions of size 1 are expanded without copies.

    offset: of the first element in its cache line, in elements.
    is_conj, is_neg: the tensor is conjugated or negated only when it is read, as the operand of a product is.
    """

    stride: tuple[int, ...] | None
    shape: tuple[int, ...]
    offset: int = 0
    is_conj: bool = False
    is_neg: bool = False


@dataclass
class Layout:
    """All of a value but its tensors' bytes.

    specs: an entry per leaf, None if the leaf is not a tensor; those leaves are pickled in `others`.
    geometries: an entry per tensor, None if the dense tensor is as the sender's was.
    structure: pickled if containers keep values of their own beside their leaves. Those may change in place, or be
        equal and yet differ (1 and True).
    """

    structure: pytree.TreeSpec | bytes
    specs: tuple[TensorSpec | None, ...]
    geometries: tuple[Geometry | None, ...]
    others: bytes

    @cached_property
    def tensor_specs(self) -> list[TensorSpec]:
        return [spec for spec in self.specs if spec is not None]

    @cached_property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.tensor_specs)

    @cached_property
    def offsets(self) -> list[int]:
        """Offsets of the tensors in one block of memory; the last entry is the block's size."""
        sizes = (-(-spec.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for spec in self.tensor_specs)
        return list(itertools.accumulate(sizes, initial=0))

    @cached_property
    def parts(self) -> "tuple[Layout, Layout]":
        """The layouts of the host's tensors and of the GPU's, without other leaves."""
        of_host = tuple(spec for spec in self.tensor_specs if not spec.is_on_gpu)
        of_gpu = tuple(spec for spec in self.tensor_specs if spec.is_on_gpu)
        return Layout(self.structure, of_host, (), b""), Layout(self.structure, of_gpu, (), b"")

    @cached_property
    def has_geometries(self) -> bool:
        return any(self.geometries)

    @cached_property
    def assemble(self) -> Callable[[Sequence[Tensor]], Any]:
        """The function that makes a value of its tensors, and makes other leaves anew: no two values share them."""
        others = self._new_others()
        if isinstance(self.structure, bytes) or any(type(leaf) not in CONSTANTS for leaf in others):
            return self._assemble_anew
        return assembler(self.structure, [spec is not None for spec in self.specs], others)

    def _assemble_anew(self, tensors: Sequence[Tensor]) -> Any:
        structure = self.structure
        treedef = _treedef_of(codec.loads(structure)) if isinstance(structure, bytes) else structure
        remaining, others = iter(tensors), iter(self._new_others())
        leaves = [next(others if spec is None else remaining) for spec in self.specs]
        return pytree.tree_unflatten(leaves, treedef)

    def _new_others(self) -> list[Any]:
        return list(codec.loads(self.others)) if self.others else []

    def encode(self) -> bytes:
        structure = self.structure if isinstance(self.structure, bytes) else _portable(self.structure)
        return _dumps((structure, self.specs, self.geometries, self.others))

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> "Layout":
        structure, specs, geometries, others = codec.loads(bytes(data))
        return Layout(structure if isinstance(structure, bytes) else _treedef_of(structure), specs, geometries, others)


def pack(value: Any, *, carries_gpu: bool = True) -> tuple[Layout, list[Tensor]]:
    """Split a value into its layout and its tensors, which are detached and share the value's memory.

    carries_gpu: whether a GPU's tensors are accepted.

    Raises:
        ValueError: a tensor that a channel cannot send.
    """
    leaves, treedef = pytree.tree_flatten(value)
    tensors: list[Tensor] = []
    specs: list[TensorSpec | None] = []
    geometries: list[Geometry | None] = []
    others: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            check_sendable(leaf, carries_gpu)
            core = layout_of_memory.without_repeats(_as_it_lies(leaf.detach()))
            spec = _spec_of(core)
            tensors.append(core)
            specs.append(spec)
            geometries.append(_geometry_of(leaf, core, spec))
        else:
            others.append(leaf)
            specs.append(None)
    structure = treedef if _is_plain(treedef) else _dumps(_portable(treedef))
    return Layout(structure, tuple(specs), tuple(geometries), _dumps(others) if others else b""), tensors


def unpack(layout: Layout, tensors: Sequence[Tensor]) -> Any:
    """Make a value of its layout and tensors. No two values share anything that could change."""
    if layout.has_geometries:
        tensors = [_restored(tensor, geometry) for tensor, geometry in zip(tensors, layout.geometries, strict=True)]
    return layout.assemble(tensors)


def copied(value: Any) -> Any:
    """Return the value as a receiver would get it: the same tensors in memory of their own."""
    layout, tensors = pack(value)
    return unpack(layout, copies(layout, tensors))


def copies(layout: Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return dense copies of the tensors that `pack` returned."""
    pairs = zip(layout.tensor_specs, tensors, strict=True)
    return [empty_tensor(spec, tensor.device).copy_(tensor) for spec, tensor in pairs]


def tensor_over(memory: Tensor, offset_bytes: int, spec: TensorSpec) -> Tensor:
    """Return the tensor at `offset_bytes` of `memory` (uint8). Unlike as_strided's it is no view for autograd."""
    offset = offset_bytes // spec.dtype.itemsize
    return torch.empty(0, dtype=spec.dtype, device=memory.device).set_(
        memory.untyped_storage(), offset, spec.shape, spec.stride
    )


def separate_tensors(memory: Tensor, layout: Layout) -> list[Tensor]:
    """Return the tensors in `memory` (uint8, kept as long as any of them is used), each with a storage of its own.

    In one storage they would look as if they shared memory, and saving one of them would save all.
    """
    buffer = memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy's stubs have no Buffer in 3.11
    places = zip(layout.offsets, layout.tensor_specs, strict=False)
    return [_tensor_in(buffer[offset : offset + spec.size_bytes], spec) for offset, spec in places]


def _tensor_in(buffer: memoryview, spec: TensorSpec) -> Tensor:
    if not spec.size_bytes:
        return empty_tensor(spec)
    with torch.inference_mode(False):
        return tensor_over(torch.frombuffer(buffer, dtype=torch.uint8), 0, spec)


def empty_tensor(spec: TensorSpec, device: torch.device = CPU) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _spec_of(tensor: Tensor) -> TensorSpec:
    # The strides are sent because kernels may sum in another order for another memory format (channels_last).
    dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
    return TensorSpec(tensor.dtype, tensor.shape, dense.stride(), is_on_gpu(tensor))


def _as_it_lies(tensor: Tensor) -> Tensor:
    """Return the tensor in memory, without the conjugation or negation that is applied when it is read."""
    return _read_otherwise(tensor, is_conj=tensor.is_conj(), is_neg=tensor.is_neg())


def _read_otherwise(tensor: Tensor, *, is_conj: bool, is_neg: bool) -> Tensor:
    """Return a view that is conjugated or negated on reading, or not any more if the tensor was."""
    tensor = tensor.conj() if is_conj else tensor
    return negative_view(tensor) if is_neg else tensor


def _geometry_of(tensor: Tensor, core: Tensor, spec: TensorSpec) -> Geometry | None:
    is_dense = core.numel() <= 1 or core.stride() == spec.stride or layout_of_memory.overlaps(core)
    stride = None if is_dense else core.stride()
    geometry = Geometry(
        stride, tuple(tensor.shape), layout_of_memory.offset_in_line(core), tensor.is_conj(), tensor.is_neg()
    )
    return None if geometry == Geometry(None, tuple(core.shape)) else geometry


def _restored(tensor: Tensor, geometry: Geometry | None) -> Tensor:
    if geometry is None:
        return tensor
    if geometry.stride is not None or geometry.offset:
        tensor = layout_of_memory.copy_with_layout(tensor, geometry.stride or tensor.stride(), geometry.offset)
    tensor = _read_otherwise(tensor.expand(geometry.shape), is_conj=geometry.is_conj, is_neg=geometry.is_neg)
    return tensor.detach()  # layers may write to it in place, which a view forbids


def _is_plain(treedef: pytree.TreeSpec) -> bool:
    """Return whether the structure is only tuples, lists, namedtuples, and dicts with string keys."""
    if treedef.is_leaf():
        return True
    context = treedef.context
    is_dict = treedef.type in (dict, OrderedDict)
    own_is_plain = all(type(key) is str for key in context) if is_dict else context is None or isinstance(context, type)
    return own_is_plain and all(_is_plain(child) for child in treedef.children())


def _portable(treedef: pytree.TreeSpec) -> Any:
    """Return the structure without torch's class for leaves, which warns when it is unpickled."""
    if treedef.is_leaf():
        return None
    return treedef.type, treedef.context, [_portable(child) for child in treedef.children()]


def _treedef_of(portable: Any) -> pytree.TreeSpec:
    if portable is None:
        return pytree.treespec_leaf()
    kind, context, children = portable
    return pytree.TreeSpec(kind, context, [_treedef_of(child) for child in children])


def _dumps(value: Any) -> bytes:
    """Return bytes for codec.loads; unlike codec.dumps this uses plain pickle where possible."""
    body, buffers = codec.encode(value)
    return pickle.dumps((body, [bytes(buffer) for buffer in buffers]), protocol=5)


class Packer:
    """`pack` for the values of one channel. Most values are like the one before, and get the very same Layout.

    Values are alike if they have the same tuples and lists, with the same constants, and tensors of the same strides in
    the same places.
    """

    def __init__(self, *, carries_gpu: bool = False) -> None:
        self._carries_gpu = carries_gpu
        self._pattern: tuple[Any, ...] | None = None
        self._layout: Layout | None = None

    def pack(self, value: Any) -> tuple[Layout, list[Tensor]]:
        """Split a value like the function `pack`.

        Raises:
            ValueError: a tensor that a channel cannot send.
        """
        tensors: list[Tensor] = []
        pattern = self._pattern_of(value, tensors)
        if pattern is not None and pattern == self._pattern and self._layout is not None:
            return self._layout, tensors
        layout, tensors = packing.pack(value, carries_gpu=self._carries_gpu)
        if layout != self._layout:
            self._layout = layout
        # With a geometry, other tensors travel than those of the value.
        self._pattern = None if layout.has_geometries else pattern
        assert self._layout is not None
        return self._layout, tensors

    def _pattern_of(self, value: Any, tensors: list[Tensor]) -> tuple[Any, ...] | None:
        """Return all that a value's layout depends on, and add its tensors to the list; None for unusual values.

        Whether channels can send the tensors is checked when a pattern is new.
        """
        kind = type(value)
        if kind is Tensor:
            if value.layout is not torch.strided or value.is_nested:
                return None  # they have no strides
            if offset_in_line(value) or value.is_conj() or value.is_neg():
                return None  # they have a geometry
            tensors.append(value.detach() if value.requires_grad else value)
            return value.dtype, value.shape, value.stride(), value.device.type
        if kind is tuple or kind is list:
            parts = [self._pattern_of(part, tensors) for part in value]
            return None if None in parts else (kind, *parts)
        return (kind, value) if kind in CONSTANTS else None


Maker = Callable[[Sequence[Tensor]], Any]


def assembler(treedef: pytree.TreeSpec, are_tensors: Sequence[bool], constants: Sequence[Any]) -> Maker:
    """Return a function that makes a value from its tensors; pytree would look up every container for each value.

    are_tensors: whether each leaf is a tensor.
    constants: the other leaves, which are the same objects in every value.
    """
    return _maker(treedef, _makers(are_tensors, constants))


@dataclass(frozen=True)
class _Constant:
    """A maker that returns the same object for every value."""

    value: Any

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        return self.value


def _makers(are_tensors: Sequence[bool], constants: Sequence[Any]) -> Iterator[Maker]:
    """Yield the makers of a value's leaves, in order."""
    tensors, others = itertools.count(), iter(constants)
    for is_tensor in are_tensors:
        yield _nth(next(tensors)) if is_tensor else _Constant(next(others))


def _nth(index: int) -> Maker:
    return lambda tensors: tensors[index]


def _maker(treedef: pytree.TreeSpec, leaves: Iterator[Maker]) -> Maker:
    if treedef.is_leaf():
        return next(leaves)
    parts = [_maker(child, leaves) for child in treedef.children()]
    if treedef.type is tuple:
        constants = [part.value for part in parts if isinstance(part, _Constant)]
        all_are_constant = len(constants) == len(parts)
        return _Constant(tuple(constants)) if all_are_constant else _tuple_of(parts)
    if treedef.type is list:
        return lambda tensors: [part(tensors) for part in parts]
    flat = pytree.TreeSpec(treedef.type, treedef.context, [pytree.treespec_leaf()] * len(parts))
    return lambda tensors: pytree.tree_unflatten([part(tensors) for part in parts], flat)


def _tuple_of(parts: Sequence[Maker]) -> Maker:
    if len(parts) == 2:  # nearly always: a message is a value and its metadata
        first, second = parts
        return lambda tensors: (first(tensors), second(tensors))
    return lambda tensors: tuple([part(tensors) for part in parts])
