"""Names in a whole model: of layers, parameters and buffers, and the versions of their modules. Needs no torch."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lp_pipe.pipeline.layers.model import FromFunction, Layer

T = TypeVar("T")
StatePlace = tuple[int, int]  # sort key in a whole state_dict: layer, position in its module's state_dict


@dataclass(frozen=True)
class ModelNames:
    """The names of a whole model's parameters and buffers, as users see them, and their order.

    tied: all names of each parameter that has several.
    places: of all names in modules that were split.
    parameter_places: of their parameters; the place of a tied one is that of its first name.
    """

    tied: tuple[tuple[str, ...], ...]
    places: Mapping[str, StatePlace]
    parameter_places: Mapping[str, StatePlace]

    def whole(self, parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
        """Return the entries of all stages, in the order of the model's state_dict()."""
        return _together(parts, self.places)

    def whole_of_parameters(self, parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
        """Return the entries of all stages, in the order of the model's parameters()."""
        return _together(parts, self.parameter_places)


def _together(parts: Iterable[Mapping[str, T]], places: Mapping[str, StatePlace]) -> dict[str, T]:
    items = [item for part in parts for item in part.items()]
    return dict(sorted(items, key=lambda item: places.get(item[0]) or (int(item[0].split(".", 1)[0]), 0)))


def layer_names(sources: Sequence[Any], first: int = 0) -> list[str]:
    """Return the position and the name or class of each layer: "0.Embedding", "1.hidden".

    first: the position of the first one.
    """
    return [f"{index}.{_name(source)}" for index, source in enumerate(sources, start=first)]


def names_by_index(parts: Iterable[tuple[int, Sequence[Any]]]) -> dict[int, str]:
    """Return `layer_names` of some parts of a model by the layers' indices.

    parts: each with its first layer's index.
    """
    named = ((first, layer_names(sources, first)) for first, sources in parts)
    return {index: name for first, names in named for index, name in enumerate(names, start=first)}


def _name(source: Any) -> str:
    module: Any = source.module if isinstance(source, FromFunction) else source
    if getattr(module, "goes_by_its_layer", False):
        return _name(module.layer)
    return str(module.name) if isinstance(module, Layer) else type(module).__name__


def formats_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the versions of the modules that saved a state, which torch keeps in `state_dict()._metadata`.

    A module with a changed format (a transposed weight) finds the format in its `_load_from_state_dict` by this
    version; without one it mostly takes the first. The first version is left out, and a state that was put together by
    hand has none.
    """
    metadata: Mapping[str, Any] = getattr(state, "_metadata", None) or {}
    return noted((name, of_module.get("version")) for name, of_module in metadata.items())


def noted(versions: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Return the versions that differ from the first."""
    return {name: version for name, version in versions if isinstance(version, int) and version != 1}


def with_formats(state: Mapping[str, Any], formats: Mapping[str, int]) -> "OrderedDict[str, Any]":
    """Return the state with its modules' versions, as torch would have made it."""
    result: OrderedDict[str, Any] = OrderedDict(state)
    metadata = OrderedDict((name, {"version": version}) for name, version in formats.items())
    result._metadata = metadata  # type: ignore[attr-defined]
    return result
