"""Rows of tables that an Embedding with max_norm makes shorter in its forward: a parameter that is not an optimizer's.

An operation that fails, and every evaluation, must leave parameters as they were; so what such a forward is about to
change is noted: the rows that it looks up and that are too long, which are few once it has seen them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
