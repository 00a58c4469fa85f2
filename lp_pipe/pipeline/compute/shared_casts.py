"""Share the casts of parameters that autocast makes between the micro-batches in flight, without a change of a bit.

    parameter (float32) ──► cast of micro-batch 0 ──► product, which saves the cast for its backward
                        └─► cast of micro-batch 1 ──► product, which would save a second copy of the same bits

Without sharing, each micro-batch in flight keeps a copy of all weights of its stage in bfloat16. autocast's own cache
shares casts, too. But with it, the gradients of a parameter that a forward uses twice add up in bfloat16, and any
thread that leaves autocast empties it. Here each use keeps its cast in the graph, and only the saved memory is one.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from lp_pipe.pipeline.compute.activation_meter import current_meter
from lp_pipe.private_torch import base_of, version_of

_CAST, _LEAF = "ToCopyBackward0", "torch::autograd::AccumulateGrad"
_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsqueezeBackward0"})


class _Cast:
    """A cast that several saved tensors share; it is gone with the last of them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


class _Saved(NamedTuple):
    """The object that the graph has in place of a saved tensor.

    holder: keeps the shared memory, or lets a meter count the tensor.
    """

    tensor: Tensor
    version: int
    holder: Any


class SharedCasts:
    """The casts of one stage's parameters that wait for backwards.

    A parameter may change between steps, and as long as torch counts that. What a layer writes to `weight.data` in a
    forward is not seen, as autograd does not see it.
    """

    def __init__(self) -> None:
        self._casts: WeakValueDictionary[tuple[Any, ...], _Cast] = WeakValueDictionary()

    def sharing(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves shared casts."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _Saved:
        version = version_of(tensor)
        saved, holder = tensor.detach(), None  # detached: a node that saves its own result would keep itself alive
        parameter = None if version else _parameter_behind(tensor)  # the layer may have written to its cast
        if parameter is not None:
            layout = tensor.dtype, base_of(tensor).stride()  # a layer may also cast to another kind or layout
            key = id(parameter), version_of(parameter), parameter.data_ptr(), layout
            holder = self._casts.get(key)
            if holder is None:
                holder = self._casts[key] = _Cast(saved)
            saved = holder.memory.as_strided(saved.shape, saved.stride(), saved.storage_offset())
            version = version_of(saved)
        meter = current_meter()
        return _Saved(saved, version, holder if meter is None else (holder, meter.hold(saved)))


def _unpack(saved: _Saved) -> Tensor:
    if version_of(saved.tensor) != saved.version:
        shape = list(saved.tensor.shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{saved.tensor.dtype} of shape {shape} is at version {version_of(saved.tensor)}; expected version "
            f"{saved.version} instead"
        )
    return saved.tensor


def _parameter_behind(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter of which the tensor is a cast, or a view of all of a cast; None for other tensors."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = _only_input(node)
    if node is None or node.name() != _CAST:
        return None
    leaf = _only_input(node)
    parameter = getattr(leaf, "variable", None) if leaf is not None and leaf.name() == _LEAF else None
    is_cast = isinstance(parameter, nn.Parameter) and parameter.numel() * tensor.itemsize == _memory_bytes(tensor)
    return parameter if is_cast else None


def _only_input(node: Node) -> Node | None:
    ((before, _),) = node.next_functions
    return before


def _memory_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
