"""Segments of a stage that keep only their inputs after a forward, and run again when a backward needs more.

The graph stays the one of the first run, but without the tensors that autograd saves in it. These come from a second
run, which happens once for each micro-batch, when the first of them is needed:

    forward     inputs -> [Linear -> Tanh -> Linear] -> output       saved: inputs, and a slot for each tensor
    backward    inputs -> [Linear -> Tanh -> Linear]                 each slot gets its tensor; this graph is dropped
                the first graph's nodes take the tensors from their slots

So gradients add up in the order of one process, also where a parameter is used twice, and both parts of a split
backward use the one second run. The means are those of torch.utils.checkpoint (use_reentrant=False), which would run
again for every part. Source: GPipe (Huang et al., 2019), section 2.3; Chen et al., 2016, for every k layers.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.activation_meter import CountedTensor, current_meter
from lp_pipe.pipeline.compute.graph_entry import entered, phony
from lp_pipe.pipeline.layers.skips import popped_by
from lp_pipe.private_torch import buffers_of, is_view, negative_view, pytree, version_of, versions_of
from lp_pipe.training.buffer_snapshot import BufferPlace, BufferSnapshot

RunLayers = Callable[[Any, dict[str, Any]], Any]  # (value, popped) -> value; stashed values are in the dict afterwards

_thread = threading.local()


def is_recomputing() -> bool:
    """Return whether this thread is in the second run of a segment."""
    return getattr(_thread, "recomputing", False)


class RecomputedSegment:
    """Consecutive layers of a stage that are a pure function of inputs, parameters and buffers under `step_rng`."""

    def __init__(self, layers: Sequence[nn.Module], name: str) -> None:
        self.name = name
        self._pops = popped_by(layers)
        modules = list(nn.ModuleList(layers).modules())
        self._modules = [m for m in modules if buffers_of(m)]
        self._parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        # What the layers write to must be copied before they run. The first run shows what that is; until then all is
        # copied.
        self._written: frozenset[BufferPlace] | None = None
        self._writes_to_inputs: bool | None = None

    def forward(self, run: RunLayers, value: Any, skips: dict[str, Any]) -> Any:
        """Run the layers without keeping the tensors that autograd saves.

        Raises:
            PipelineError: the layers have written to a buffer or input to which earlier runs did not write.
        """
        own = {name: skips.pop(name) for name in self._pops if name in skips}
        inputs = _Inputs((value, own), copy=self._writes_to_inputs is not False)
        buffers = BufferSnapshot(self._modules, self._written)
        frame = _SegmentRun(self, run, inputs)
        with saved_tensors_hooks(frame.pack, _unpack):
            value = run(value, own)
        self._learn(inputs, buffers)
        frame.complete(buffers.only(self._written or frozenset()))
        skips.update(own)
        return value

    def states_of_parameters(self) -> list[tuple[int, int]]:
        """Return values that change when a parameter is written to or gets other memory.

        MoCo's key encoder does the latter (`p.data = …`).
        """
        return [(version_of(parameter), parameter.data_ptr()) for parameter in self._parameters]

    def _learn(self, inputs: "_Inputs", buffers: BufferSnapshot) -> None:
        lost = buffers.without_copy()
        self._written = (self._written or frozenset()) | buffers.written()
        written = inputs.were_written()
        if written and not inputs.is_copied:
            lost.append("its input")
        self._writes_to_inputs = written or bool(self._writes_to_inputs)
        if lost:
            raise PipelineError(
                f"{self.name}: cannot be recomputed, because in this run it first wrote to {', '.join(lost)}, of "
                "which there is no copy: run the step again, or leave these layers out of recompute"
            )


class _Inputs:
    """The arguments that a segment was called with."""

    def __init__(self, values: tuple[Any, dict[str, Any]], *, copy: bool) -> None:
        leaves, self._spec = pytree.tree_flatten(values)
        self.is_copied = copy
        self._wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self._given = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)] if copy else []
        self._given_versions = _versions(self._given)
        kept: dict[int, Any] = {}  # by the leaf's id: a tensor that comes twice is one object again
        storages: dict[int, torch.UntypedStorage] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in kept:
                kept[id(leaf)] = _copied(leaf, storages) if copy else leaf.detach()
        self._leaves = [kept.get(id(leaf), leaf) for leaf in leaves]
        meter = current_meter()
        self._held = [meter.hold(tensor) for tensor in kept.values()] if meter is not None else []
        self._versions = _versions(self._leaves)

    def were_written(self) -> bool:
        """Return whether the segment, which has just run, has changed its inputs in place; to be asked once."""
        written = _versions(self._given) != self._given_versions or self.have_changed
        self._given = []
        self._given_versions = []
        return written

    @property
    def have_changed(self) -> bool:
        """Whether the kept inputs were changed in place."""
        return _versions(self._leaves) != self._versions

    def again(self) -> tuple[Any, dict[str, Any]]:
        """Return the values for the second run: they require gradients as before, and may be written to."""
        fresh: dict[int, Tensor] = {}
        for leaf, wanted in zip(self._leaves, self._wanted, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in fresh:
                # .data: to enter counts as a write, which must not show in tensors that autograd has saved.
                fresh[id(leaf)] = entered(phony(), [], [leaf.data])[0] if wanted else leaf.data
        value, own = pytree.tree_unflatten([fresh.get(id(leaf), leaf) for leaf in self._leaves], self._spec)
        return value, own


class _SavedSlot:
    """The object that the graph has in place of a saved tensor; the tensor dies with it."""

    def __init__(self, frame: "_SegmentRun") -> None:
        self.frame = frame
        self.tensor: Tensor | None = None
        self.held: CountedTensor | None = None


class _AllFilled(BaseException):
    """The exception that ends a second run once every slot is filled.

    It is no Exception, which layers may catch.
    """


class _SegmentRun:
    """A run of a segment for one micro-batch."""

    def __init__(self, segment: RecomputedSegment, run: RunLayers, inputs: _Inputs) -> None:
        self._segment = segment
        self._run: RunLayers | None = run
        self._inputs: _Inputs | None = inputs
        self._buffers = BufferSnapshot(())
        self._is_complete = False
        self._meter = current_meter()
        # Weak: only the graph keeps the slots, and drops each as soon as its node has run.
        self._slots: list[weakref.ref[_SavedSlot]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._filled = 0
        self._is_over = False
        self._last_is_new = False

    def pack(self, tensor: Tensor) -> _SavedSlot:
        slot = _SavedSlot(self)
        self._slots.append(weakref.ref(slot))
        self._kinds.append((tensor.shape, tensor.dtype))
        return slot

    def complete(self, buffers: BufferSnapshot) -> None:
        self._buffers = buffers
        self._is_complete = True

    def fill(self) -> None:
        """Run the segment again, and give every slot its tensor.

        Raises:
            PipelineError: the second run differs from the first.
        """
        if self._run is None or self._inputs is None:
            raise self._differs("fewer were saved")
        if not self._is_complete:
            raise PipelineError(
                f"{self._segment.name}: cannot be recomputed, because a layer calls autograd in its forward: leave "
                "these layers out of recompute"
            )
        if self._inputs.have_changed:
            raise PipelineError(
                f"{self._segment.name}: cannot be recomputed, because a later layer has changed their input in place: "
                "recompute both layers together, or give that layer inplace=False"
            )
        run, inputs = self._run, self._inputs
        self._run = self._inputs = None
        with (
            self._until_all_are_filled(),
            torch.enable_grad(),
            self._buffers.swapped_in(),
            saved_tensors_hooks(self._fill_next, _itself),
            _again(),
        ):
            run(*inputs.again())
        self._buffers = BufferSnapshot(())
        if self._filled < len(self._slots):
            raise self._differs(f"{self._filled} tensors")

    def _fill_next(self, tensor: Tensor) -> Tensor:
        position, self._filled = self._filled, self._filled + 1
        if position == len(self._slots):
            raise self._differs("more were saved")
        if self._kinds[position] != (tensor.shape, tensor.dtype):
            raise self._differs(f"saved tensor {position} was {list(tensor.shape)} of {tensor.dtype}")
        # Detached: a node that saves its own result would hold itself for ever.
        value = tensor.detach()
        slot = self._slots[position]()
        if slot is not None:
            slot.tensor = value
            slot.held = self._meter.hold(value) if self._meter is not None else None
        # rrelu saves its noise, then its input, and writes the noise after that: its call must come to its end.
        last_is_new, self._last_is_new = self._last_is_new, _is_new(tensor)
        if self._filled == len(self._slots) and not last_is_new and not self._last_is_new:
            self._is_over = True
            raise _AllFilled
        return value

    @contextlib.contextmanager
    def _until_all_are_filled(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not self._is_over:  # TorchScript turns _AllFilled into a RuntimeError
                raise
            error.__traceback__ = None  # a reference cycle (Python 3.12) with the layers' locals: activations

    def _differs(self, how: str) -> PipelineError:
        return PipelineError(
            f"{self._segment.name}: the second run differs from the first ({how}; the first time {len(self._slots)} "
            "tensors): recompute needs layers that depend on their inputs, parameters, buffers and torch's generator "
            "only; leave the others out of recompute"
        )


def _unpack(slot: _SavedSlot) -> Tensor:
    if slot.tensor is None:
        slot.frame.fill()
    assert slot.tensor is not None, "the second run fills every slot that is alive"
    return slot.tensor


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def _again() -> Iterator[None]:
    before = is_recomputing()
    _thread.recomputing = True
    try:
        yield
    finally:
        _thread.recomputing = before


def _is_new(tensor: Tensor) -> bool:
    """Return whether the tensor may be memory that an operation has allocated and will write to."""
    return not (tensor.requires_grad or is_view(tensor) or isinstance(tensor, nn.Parameter))


def _versions(leaves: Sequence[Any]) -> list[int]:
    return versions_of(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _copied(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return a copy with all strides and gaps, because kernels may sum in another order in a denser layout."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address not in storages:
        storages[address] = storage.clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storages[address], tensor.storage_offset(), tensor.shape, tensor.stride())
    # The numbers in memory may be conjugated or negated only when they are read.
    copy = copy.conj() if tensor.is_conj() else copy
    return negative_view(copy) if tensor.is_neg() else copy
