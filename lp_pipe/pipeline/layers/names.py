"""The names of parameters, as a pipeline's users see them.

Inside a pipeline a parameter is called as nn.Sequential(*layers) would, "2.weight", so that its name says which layer
has it. Users see the same, except for the pieces of a split module: these have the names that the module gave them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.model import FromFunction
from lp_pipe.pipeline.layers.model_names import ModelNames, Place
from lp_pipe.pipeline.layers.piece import Piece
from lp_pipe.pipeline.layers.wrapper import Wrapper


def name_prefix(index: int, layer: nn.Module) -> str:
    """What comes before the names that a layer gives its parameters."""
    return "" if _piece_of(layer) is not None else f"{index}."


def model_names(sources: Sequence[Any], tied: Sequence[Sequence[str]]) -> ModelNames:
    """Of a model with these layers. tied: by the names inside, all of each parameter that has several.

    Raises:
        PipelineError: two modules that were split have a name in common, or a piece is missing.
    """
    places = _own_places(sources)
    outside = tuple(tuple(_outer_name(name, sources) for name in names) for names in tied)
    return ModelNames(outside, places, _parameter_places(sources, places))


def _own_places(sources: Sequence[Any]) -> dict[str, Place]:
    """All names of modules that were split. The pieces of one count as its first: its own order holds."""
    pieces = {index: piece for index, source in enumerate(sources) if (piece := _piece_of(source)) is not None}
    origins: dict[str, str] = {}
    places: dict[str, Place] = {}
    for index, piece in pieces.items():
        for position, name in enumerate(piece.order):
            head = name.split(".", 1)[0]
            taken = head.isdecimal() and int(head) < len(sources) and int(head) not in pieces
            if taken or origins.setdefault(name, piece.origin) != piece.origin:
                raise PipelineError(
                    f"layer {index} is a piece of a split module, whose {name!r} is the name of another layer's, too: "
                    "give the module's submodules other names"
                )
            places.setdefault(name, (index, position))
    present = {name for piece in pieces.values() for name in piece.state_dict()}
    if not places.keys() <= present:
        missing = sorted(places.keys() - present)[0]
        raise PipelineError(f"a piece of a split module is missing among the layers, the one with {missing!r}")
    return places


def _parameter_places(sources: Sequence[Any], places: Mapping[str, Place]) -> dict[str, Place]:
    names: dict[int, list[str]] = {}
    for piece in filter(None, map(_piece_of, sources)):
        for name, parameter in piece.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return {name: min(places[alias] for alias in aliases) for aliases in names.values() for name in aliases}


def _outer_name(name: str, sources: Sequence[Any]) -> str:
    """What users call the parameter that is `name` inside."""
    index, inner = name.split(".", 1)
    return name if _piece_of(sources[int(index)]) is None else inner


def _piece_of(source: Any) -> Piece | None:
    layer = source.module if isinstance(source, FromFunction) else source
    while isinstance(layer, Wrapper) and not isinstance(layer, Piece):
        layer = layer.layer
    return layer if isinstance(layer, Piece) else None
