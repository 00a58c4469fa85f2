"""Messages between stages: tensors without their graph."""

import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.overlaps import lies_in, overlapping
from lp_pipe.private_torch import hooks_of, is_view, pytree


class Message(NamedTuple):
    """A value without its graph, as it travels from stage to stage.

    A named tuple, because it is made twice in every action: a frozen dataclass takes four times as long.

    wants_gradient: whether each tensor of the value requires a gradient, in pytree order; repeated ones count once.
    is_view: likewise, or empty: whether autograd knows the tensor as a view, such as Linear's output of three
        dimensions. A write to a view has another backward: gradients pass in the layout of its base.
    overlapping: positions of tensors to which no layer may write: another tensor had a part of the same memory, or the
        sender keeps it; or the tensor is a view with a hook, which autograd forgets at a write.
    """

    value: Any
    wants_gradient: tuple[bool, ...]
    is_view: tuple[bool, ...] = ()
    overlapping: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[Any, ...]:
        """The fields to be sent; `Message(*parts)` is the message again. Mostly two, because each one takes time."""
        if self.overlapping:
            return self.value, self.wants_gradient, self.is_view, self.overlapping
        return (self.value, self.wants_gradient, self.is_view) if self.is_view else (self.value, self.wants_gradient)


@dataclass(frozen=True)
class _Again:
    """A mark in place of a tensor that the value holds already, as leaf `position`.

    Two tensors at the other end would have two gradients, added up here in another order than in one process.
    """

    position: int


def to_message(value: Any, kept: Collection[int] | None = None) -> Message:
    """Cut a stage's output from its graph, to be sent to the next stage. It shares the output's memory.

    kept: addresses of the memory of the sender's parameters and buffers; None: do not look for `overlapping` tensors.

    Raises:
        PipelineError: an object that is no container holds tensors that require a gradient.
    """
    if type(value) is Tensor:  # the usual case; pytree is slow
        is_unwritten = kept is not None and (lies_in(value, kept) or _is_hooked_view(value))
        views = (True,) if is_view(value) else ()
        return Message(value.detach(), (value.requires_grad,), views, (0,) if is_unwritten else ())
    leaves, spec = pytree.tree_flatten(value)
    tensors = tensors_of(value)
    wanted = tuple(tensor.requires_grad for tensor in tensors)
    positions: dict[int, int] = {}
    sent: list[Any] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            _refuse_hidden_tensors(leaf)
            sent.append(leaf)
        elif id(leaf) in positions:
            sent.append(_Again(positions[id(leaf)]))
        else:
            positions[id(leaf)] = position
            sent.append(leaf.detach())
    are_views = tuple(is_view(tensor) for tensor in tensors)
    unwritten: set[int] = set()
    if kept is not None:
        unwritten = {place for place, tensor in enumerate(tensors) if lies_in(tensor, kept) or _is_hooked_view(tensor)}
        unwritten.update(overlapping(tensors))
    value = pytree.tree_unflatten(sent, spec)
    return Message(value, wanted, are_views if any(are_views) else (), tuple(sorted(unwritten)))


def with_repeats(leaves: list[Any]) -> list[Any]:
    """Return the leaves of a message's value as the sender's stage had them."""
    return [leaves[leaf.position] if isinstance(leaf, _Again) else leaf for leaf in leaves]


def tensors_of(value: Any) -> list[Tensor]:
    """Return each tensor of a value once, in pytree order."""
    if type(value) is Tensor:
        return [value]
    return list({id(leaf): leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}.values())


def _is_hooked_view(tensor: Tensor) -> bool:
    """Return whether the tensor is a view with a hook: behind a cut the hook would be called even after a write."""
    return bool(hooks_of(tensor, "backward")) and is_view(tensor)


def _refuse_hidden_tensors(leaf: Any) -> None:
    for name, tensor in untracked_tensors(leaf):
        if tensor.requires_grad:
            raise PipelineError(
                f"the stage's output holds a {type(leaf).__name__}, whose tensor {name!r} would lose its gradient on "
                "the way to the next stage: return tensors in tuples, lists or plain dicts, cut elsewhere, or "
                "register the class with torch (torch.utils._pytree.register_pytree_node)"
            )


_DEEPEST = 5  # an object with more levels than these is no output of a layer
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, types.ModuleType, nn.Module)


def untracked_tensors(leaf: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor inside an object that is no container to torch's pytree, with the path to it.

    Such objects are dataclasses and subclasses of dict. The path has attributes and items, joined by dots.
    """
    if not isinstance(leaf, _PLAIN):
        yield from _below(leaf, (), {id(leaf)})


def _below(value: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    for name, part in _parts(value):
        if isinstance(part, Tensor):
            yield ".".join((*path, name)), part
        elif not isinstance(part, _PLAIN) and id(part) not in seen and len(path) < _DEEPEST:
            seen.add(id(part))
            yield from _below(part, (*path, name), seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(value, name):
                yield name, getattr(value, name)
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):  # no other sequences: a data set is a sequence, too
        yield from ((str(index), part) for index, part in enumerate(value))
