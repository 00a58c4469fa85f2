"""DOC"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import versions_of
from lp_pipe.training.buffer_snapshot import BufferSnapshot
from lp_pipe.training.device import CPU


def are_users(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of parameters that belong to modules which are not torch's own."""
    users = [module for module in modules if type(module).__module__.partition(".")[0] != "torch"]
    return {id(parameter) for module in users for parameter in module.parameters(recurse=False)}


class ForwardWrites:
    """Of some modules, whose parameters have the names that users see. with_buffers: they, and a loss that has some."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        with_buffers: Iterable[nn.Module],
    ) -> None:
        self._with_buffers = list(with_buffers)
        self._tag = 0
        self.buffers_before = BufferSnapshot(())  # of the operation with this tag
        self._rows = ShortenedRows(modules)
        tables = {id(module.weight) for module in modules if has_short_rows(module)}
        self._named = [(name, parameter) for name, parameter in named_parameters if id(parameter) not in tables]
        own = are_users(modules)
        suspects = frozenset(place for place, (_, parameter) in enumerate(self._named) if id(parameter) in own)
        self._suspects = {True: suspects, False: suspects}  # by whether it trains; nobody is after the first operation
        self._written: frozenset[int] = frozenset()
        self._versions: list[int] | None = None
        self._copies: dict[int, Tensor] = {}
        self._lost: str | None = None

    def begin(self, tag: int, *, trains: bool) -> None:
        """The forwards of operation `tag` are about to run.

        Raises:
            PipelineError: as `check`.
        """
        self.check()
        self.forget()
        self._tag, self.buffers_before = tag, BufferSnapshot(self._with_buffers)
        self._versions = self._now()
        self._copies = {place: self._named[place][1].detach().clone() for place in self._written}
        for place in self._suspects[trains] - self._written:  # many, perhaps: a GPU has no room for all of them twice
            self._copies[place] = self._named[place][1].detach().to(CPU, copy=True)

    def end(self, *, trains: bool) -> None:
        """They have run; `forget` or `undo` comes later."""
        self._suspects[trains] = frozenset()
        self._written |= self._changed()
        self._copies = {place: copy for place, copy in self._copies.items() if place in self._written}

    def forget(self) -> None:
        """What was changed in parameters stays so."""
        self._rows.forget()
        self._versions = None
        self._copies.clear()

    def undo(self, tag: int) -> None:
        """Put back what was there before operation `tag`; nobody who has saved some of it for a backward notices.

        It may have failed before it began here: what the one before it has written to buffers stays.
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
        """Evaluation `tag` is the body, after which all is as before it.

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
        """Before the weights are used.

        Raises:
            PipelineError: one was changed, and could not be put back.
        """
        if self._lost is not None:
            raise PipelineError(
                f"a forward writes to parameter {self._lost!r}, and has changed it in an evaluation or in a step that "
                "has failed: load() or load_state_dict() to go on, which will not happen again with this parameter"
            )

    def are_loaded(self) -> None:
        """All parameters were set."""
        self._lost = None

    def _now(self) -> list[int]:
        return versions_of(parameter for _, parameter in self._named)

    def _changed(self) -> set[int]:
        """Where something has changed since `begin`; what is written to .data shows in a copy alone."""
        if self._versions is None:
            return set()
        versions = zip(self._versions, self._now(), strict=True)
        changed = {place for place, (before, now) in enumerate(versions) if before != now}
        return changed | {
            place
            for place, copy in self._copies.items()
            if not torch.equal(copy, self._named[place][1].detach().to(copy.device))
        }


_ROUNDING = 1e-3  # torch's kernel may find a row too long whose norm comes out a bit smaller here


class ShortenedRows:
    """Of some modules, whose forwards from now on are watched."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # a table, indices of rows, and what these held
        for module in modules:
            if has_short_rows(module):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def forget(self) -> None:
        """What was changed stays so."""
        self._before.clear()

    def undo(self) -> None:
        """Put back what the rows held; nobody who has saved a table for a backward notices."""
        for table, indices, rows in reversed(self._before):
            table.data.index_copy_(0, indices, rows)
        self.forget()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        looked_up, table = args[0] if args else kwargs.get("input"), module.weight
        if not isinstance(looked_up, Tensor) or not isinstance(table, Tensor):
            return  # torch says what is wrong with that
        with torch.no_grad():
            indices = looked_up.unique().long()
            rows = table.detach()[indices]
            norms = torch.linalg.vector_norm(rows.float(), float(module.norm_type), dim=1)  # type: ignore[arg-type]
            are_long = norms > module.max_norm * (1 - _ROUNDING)  # type: ignore[operator]
            self._before.append((table, indices[are_long], rows[are_long]))


def has_short_rows(module: nn.Module) -> bool:
    """Whether it is one of torch's tables with max_norm."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def writers(layers: Sequence[nn.Module], first_layer: int) -> set[int]:
    """The indices of layers that use a table with max_norm: a second run would not find what the first one has used."""
    modules = [module for layer in layers for module in layer.modules() if has_short_rows(module)]
    tables = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    return {
        index
        for index, layer in enumerate(layers, start=first_layer)
        if tables and any(id(parameter) in tables for parameter in layer.parameters())
    }
