"""Undo what forwards write to buffers and parameters: failed steps and evaluations leave both as they were.

Buffers are copied before each operation. Of an Embedding with max_norm, which shortens rows of its table in its
forward, the rows that it is about to shorten are copied: few, once it has seen them. Any other layer may write to
parameters too, which shows only when it has run. So parameters of modules that are not torch's own are copied in the
first operation, and later only those that were seen to change. A parameter that changes without a copy cannot be
restored; then nothing runs before weights are loaded.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import versions_of
from lp_pipe.training.buffer_snapshot import BufferSnapshot
from lp_pipe.training.device import CPU


def parameters_of_user_modules(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters of modules that are not torch's own."""
    users = [module for module in modules if type(module).__module__.partition(".")[0] != "torch"]
    return {id(parameter) for module in users for parameter in module.parameters(recurse=False)}


class ForwardWrites:
    """A record of what forwards write to the buffers and parameters of some modules.

    named_parameters: under the names that users see.
    with_buffers: the modules with buffers, and a loss that has some.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        with_buffers: Iterable[nn.Module],
    ) -> None:
        self._with_buffers = list(with_buffers)
        self._tag = 0
        self.buffers_before = BufferSnapshot(())  # before the operation self._tag
        self._rows = ShortenedRows(modules)
        tables = {id(module.weight) for module in modules if has_short_rows(module)}
        self._named = [(name, parameter) for name, parameter in named_parameters if id(parameter) not in tables]
        own = parameters_of_user_modules(modules)
        suspects = frozenset(place for place, (_, parameter) in enumerate(self._named) if id(parameter) in own)
        # by whether the operation trains; empty after the first operation
        self._suspects = {True: suspects, False: suspects}
        self._written: frozenset[int] = frozenset()
        self._versions: list[int] | None = None
        self._copies: dict[int, Tensor] = {}
        self._lost: str | None = None

    def begin(self, tag: int, *, trains: bool) -> None:
        """Copy what the forwards of operation `tag` may write to; called before they run.

        Raises:
            PipelineError: as `check`.
        """
        self.check()
        self.forget()
        self._tag, self.buffers_before = tag, BufferSnapshot(self._with_buffers)
        self._versions = self._now()
        self._copies = {place: self._named[place][1].detach().clone() for place in self._written}
        for place in self._suspects[trains] - self._written:  # on the host: a GPU may have no room for two of each
            self._copies[place] = self._named[place][1].detach().to(CPU, copy=True)

    def end(self, *, trains: bool) -> None:
        """Note what the forwards have written; `forget` or `undo` follows."""
        self._suspects[trains] = frozenset()
        self._written |= self._changed()
        self._copies = {place: copy for place, copy in self._copies.items() if place in self._written}

    def forget(self) -> None:
        """Keep what was written to parameters."""
        self._rows.forget()
        self._versions = None
        self._copies.clear()

    def undo(self, tag: int) -> None:
        """Restore the values before operation `tag`, in place and without new versions.

        If the operation failed before it began here, buffers keep what the operation before it has written.
        """
        if tag == self._tag:
            self.buffers_before.restore()
            self.buffers_before = BufferSnapshot(())
        self._rows.undo()
        for place in sorted(self._changed()):
            name, parameter = self._named[place]
            if place in self._copies:
                parameter.data.copy_(self._copies[place])
            else:
                self._lost = self._lost or name
            self._written |= {place}
        self.forget()

    @contextmanager
    def undone(self, tag: int) -> Iterator[None]:
        """Run evaluation `tag` in the body, and restore everything after it.

        Raises:
            PipelineError: as `check`.
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

    def _now(self) -> list[int]:
        return versions_of(parameter for _, parameter in self._named)

    def _changed(self) -> set[int]:
        """Return the positions of parameters that have changed since `begin`; a write to .data shows only by a copy."""
        if self._versions is None:
            return set()
        versions = zip(self._versions, self._now(), strict=True)
        changed = {place for place, (before, now) in enumerate(versions) if before != now}
        return changed | {
            place
            for place, copy in self._copies.items()
            if not torch.equal(copy, self._named[place][1].detach().to(copy.device))
        }


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
