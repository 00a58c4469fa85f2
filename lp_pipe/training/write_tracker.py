"""Find what forwards write to buffers and parameters, and treat each write as the policy of its tensor says.

Between `begin` and `end` forwards run. A write to a tensor shows by its version, a write to `.data` only by a copy. So
buffers are copied before each operation. Parameters of modules that are not torch's own are copied in the first
operation, and later only those that were seen to change. Of an Embedding with max_norm, which shortens rows of its
table in its forward, the rows that it is about to shorten are copied: few, once it has seen them.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import buffers_of, parameters_of, put_buffer, versions_of
from lp_pipe.training.buffer_snapshot import BufferPlace, BufferSnapshot, buffer_at
from lp_pipe.training.device import CPU

_NO_PLACE: frozenset[BufferPlace] = frozenset()


class WritePolicy(enum.Enum):
    """The fate of a write to a tensor by a forward.

    COPY: the write stays, and `separate` gives the next forward another tensor to write to.
    UNDO: the write stays, and `undo` restores the value that the tensor had at `begin`.
    REFUSE: `end` raises an error, and `undo` restores the value.
    """

    COPY = enum.auto()
    UNDO = enum.auto()
    REFUSE = enum.auto()


class WriteTracker:
    """The writes of forwards to the buffers and parameters of some modules.

    modules: that own the parameters. named_parameters: under the names that users see; their policy is UNDO.
    with_buffers: the modules with buffers, and a loss that has some. buffers: the policy of all of them.
    can_undo: whether `undo` is ever called; if not, shortened rows are not copied.
    refused: names of parameters, and places of buffers, with the policy REFUSE, each with the error's text.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module] = (),
        named_parameters: Iterable[tuple[str, nn.Parameter]] = (),
        with_buffers: Iterable[nn.Module] = (),
        *,
        buffers: WritePolicy = WritePolicy.UNDO,
        refused: Mapping[str | BufferPlace, str] = MappingProxyType({}),
        can_undo: bool = True,
    ) -> None:
        self._with_buffers = list(with_buffers)
        self._buffers = buffers
        self._refused = refused
        self._tag = 0
        self.buffers_before = BufferSnapshot(())  # before the operation self._tag
        self.written_buffers: frozenset[BufferPlace] | None = None  # with COPY; None before the first forward
        self._rows = ShortenedRows(modules if can_undo else ())
        self._named = list(named_parameters)
        tables = {id(module.weight) for module in modules if has_short_rows(module)}
        self._tables = {position for position, (_, p) in enumerate(self._named) if id(p) in tables}  # `_rows` has these
        places = {id(p): (module, own) for module in modules for own, p in parameters_of(module).items()}
        self._refused_places = {
            position: places[id(parameter)] for position, (name, parameter) in enumerate(self._named) if name in refused
        }
        users = parameters_of_user_modules(modules)
        suspects = frozenset(position for position, (_, p) in enumerate(self._named) if id(p) in users)
        # by whether the operation trains; empty after the first operation
        self._suspects = {True: suspects, False: suspects}
        self._written: frozenset[int] = frozenset()
        self._tensors: list[Tensor] = []  # those at `begin`: an asynchronous schedule puts others into their places
        self._versions: list[int] = []
        self._memory: dict[int, Tensor] = {}  # of the refused ones; held, or it could be given to another tensor
        self._copies: dict[int, Tensor] = {}
        self._lost: str | None = None

    def begin(self, tag: int = 0, *, trains: bool = True) -> None:
        """Copy what the forwards of operation `tag` may write to; called before they run.

        Raises:
            PipelineError: as `check`.
        """
        self.check()
        self.forget()
        is_known = self._buffers is WritePolicy.COPY and self.written_buffers is not None
        self._tag = tag
        self.buffers_before = BufferSnapshot(self._with_buffers, _NO_PLACE if is_known else None)
        self._tensors = [parameter for _, parameter in self._named]
        for position, (module, own) in self._refused_places.items():
            present = parameters_of(module)[own]
            assert present is not None, "the place is that of a parameter"
            self._tensors[position] = present
            self._memory[position] = self._tensors[position].data
        self._versions = versions_of(self._tensors)
        self._copies = {position: self._tensors[position].detach().clone() for position in self._written}
        for position in self._suspects[trains] - self._written:  # on the host: a GPU may have no room for two of each
            self._copies[position] = self._tensors[position].detach().to(CPU, copy=True)

    def end(self, *, trains: bool = True) -> None:
        """Note what the forwards have written; `forget`, `separate` or `undo` follows.

        Raises:
            PipelineError: they have written to a tensor with the policy REFUSE.
        """
        if self._buffers is WritePolicy.COPY:
            written = self.buffers_before.written()
            for place in written & self._refused.keys():
                raise PipelineError(self._refused[place])
            self.written_buffers = (self.written_buffers or _NO_PLACE) | written
        self._suspects[trains] = frozenset()
        changed = self._changed()
        self._written |= changed - self._tables
        self._copies = {position: copy for position, copy in self._copies.items() if position in self._written}
        for position in sorted(changed):
            name, _ = self._named[position]
            if name in self._refused:
                raise PipelineError(
                    f"a forward writes to parameter {name!r}, as Embedding(max_norm=…) does, but {self._refused[name]}"
                )

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Run forwards in the body, between `begin` and `end`; nothing is undone, and no tensor is held afterwards."""
        self.begin()
        try:
            yield
            self.end()
        finally:
            self.forget()
            self.buffers_before = BufferSnapshot(())

    def forget(self) -> None:
        """Keep what was written to parameters."""
        self._rows.forget()
        self._tensors, self._versions = [], []
        self._memory.clear()
        self._copies.clear()

    def separate(self) -> None:
        """Let the next forward write to other buffers than those that earlier forwards may have saved."""
        if not self.written_buffers:
            return
        copies: dict[int, Tensor] = {}  # a buffer with two names stays one tensor
        whole = self._apart()
        for module, name in self.written_buffers:
            buffer = buffer_at((module, name))
            if _has_memory(buffer) and buffer.untyped_storage().data_ptr() in whole:
                put_buffer(module, name, copies.setdefault(id(buffer), buffer.clone()))

    def undo(self, tag: int) -> None:
        """Restore the values before operation `tag`, in place and without new versions.

        If the operation failed before it began here, buffers keep what the operation before it has written.
        """
        if tag == self._tag:
            self.buffers_before.restore()
            self.buffers_before = BufferSnapshot(())
        self._rows.undo()
        for position in sorted(self._changed() - self._tables):
            if position in self._copies:
                self._tensors[position].data.copy_(self._copies[position])
            else:
                self._lost = self._lost or self._named[position][0]
            self._written |= {position}
        self.forget()

    @contextmanager
    def undone(self, tag: int) -> Iterator[None]:
        """Run evaluation `tag` in the body, and restore everything after it.

        Raises:
            PipelineError: as `check` and `end`.
        """
        self.begin(tag, trains=False)
        try:
            yield
            self.end(trains=False)
        finally:
            self.undo(tag)
        self.check()

    def check(self) -> None:
        """Refuse to use the weights if one was changed and could not be restored.

        Raises:
            PipelineError: the error names the parameter.
        """
        if self._lost is not None:
            raise PipelineError(
                f"a forward writes to parameter {self._lost!r} and has changed it in an evaluation or in a step that "
                "has failed, and there was no copy to restore: call load() or load_state_dict() to go on; from now on "
                "this parameter is copied"
            )

    def note_loaded(self) -> None:
        """Note that all parameters were set."""
        self._lost = None

    def _changed(self) -> set[int]:
        """Return the positions of parameters that have changed since `begin`; a write to .data shows only by a copy."""
        versions = zip(self._versions, versions_of(self._tensors), strict=True)
        changed = {position for position, (before, now) in enumerate(versions) if before != now}
        changed |= {
            position
            for position, memory in self._memory.items()
            if memory.data_ptr() != self._tensors[position].data_ptr()
        }
        return changed | {
            position
            for position, copy in self._copies.items()
            if not torch.equal(copy, self._tensors[position].detach().to(copy.device))
        }

    def _apart(self) -> set[int]:
        """Return the addresses of memory that a single buffer uses."""
        buffers = {id(b): b for module in self._with_buffers for b in buffers_of(module).values() if _has_memory(b)}
        found = Counter(buffer.untyped_storage().data_ptr() for buffer in buffers.values())
        return {address for address, count in found.items() if count == 1}


def parameters_of_user_modules(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters of modules that are not torch's own."""
    users = [module for module in modules if type(module).__module__.partition(".")[0] != "torch"]
    return {id(parameter) for module in users for parameter in module.parameters(recurse=False)}


def _has_memory(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a buffer has memory in one piece, unlike a sparse one."""
    return buffer is not None and buffer.layout is torch.strided


_ROUNDING = 1e-3  # torch's kernel may find a row too long that is a bit shorter by this computation


class ShortenedRows:
    """The rows that forwards of tables with max_norm shorten, from now on."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # (table, row indices, old rows)
        for module in modules:
            if has_short_rows(module):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def forget(self) -> None:
        """Keep the shortened rows."""
        self._before.clear()

    def undo(self) -> None:
        """Restore the rows, without a new version: a table that autograd has saved stays valid."""
        for table, indices, rows in reversed(self._before):
            table.data.index_copy_(0, indices, rows)
        self.forget()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        looked_up, table = args[0] if args else kwargs.get("input"), module.weight
        if not isinstance(looked_up, Tensor) or not isinstance(table, Tensor):
            return  # torch raises the error
        with torch.no_grad():
            indices = looked_up.unique().long()
            rows = table.detach()[indices]
            norms = torch.linalg.vector_norm(rows.float(), float(module.norm_type), dim=1)  # type: ignore[arg-type]
            are_long = norms > module.max_norm * (1 - _ROUNDING)  # type: ignore[operator]
            self._before.append((table, indices[are_long], rows[are_long]))


def has_short_rows(module: nn.Module) -> bool:
    """Return whether a module is one of torch's tables with max_norm."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def layers_with_max_norm(layers: Sequence[nn.Module], first_layer: int) -> set[int]:
    """Return the indices of layers that use a table with max_norm.

    A second run of such a layer would not find the rows that the first one has used.
    """
    modules = [module for layer in layers for module in layer.modules() if has_short_rows(module)]
    tables = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    return {
        index
        for index, layer in enumerate(layers, start=first_layer)
        if tables and any(id(parameter) in tables for parameter in layer.parameters())
    }
