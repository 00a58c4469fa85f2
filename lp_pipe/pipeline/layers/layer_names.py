"""What the layers of a model are called in profiles and plans. Needs no torch."""

from collections.abc import Iterable, Sequence
from typing import Any

from lp_pipe.pipeline.layers.model import FromFunction, Layer


def layer_names(sources: Sequence[Any], first: int = 0) -> list[str]:
    """The place of each layer, counted from `first`, and its name or its module's class: "0.Embedding", "1.hidden"."""
    return [f"{index}.{_name(source)}" for index, source in enumerate(sources, start=first)]


def names_by_index(parts: Iterable[tuple[int, Sequence[Any]]]) -> dict[int, str]:
    """The same of some parts of a model, each with its first layer's index; by the layers' indices."""
    named = ((first, layer_names(sources, first)) for first, sources in parts)
    return {index: name for first, names in named for index, name in enumerate(names, start=first)}


def _name(source: Any) -> str:
    module: Any = source.module if isinstance(source, FromFunction) else source
    if getattr(module, "goes_by_its_layer", False):
        return _name(module.layer)
    return str(module.name) if isinstance(module, Layer) else type(module).__name__
