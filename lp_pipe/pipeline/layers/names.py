"""The names of parameters, as a pipeline's users see them.

Inside a pipeline a parameter is called as nn.Sequential(*layers) would, "2.weight", so that its name says which layer
has it. Users see the same, except for the pieces of a split module: these have the names that the module gave them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.model import FromFunction
from lp_pipe.pipeline.layers.piece import Piece
from lp_pipe.pipeline.layers.wrapper import Wrapper

Place = tuple[int, int]  # what a whole state_dict is sorted by: a layer, and the position in its module's state_dict


def name_prefix(index: int, layer: nn.Module) -> str:
    """What comes before the names that a layer gives its parameters."""
    return "" if _piece_of(layer) is not None else f"{index}."


def own_names(sources: Sequence[Any]) -> dict[str, Place]:
    """All names of modules that were split. The pieces of one count as its first: its own order holds.

    Raises:
        PipelineError: two modules have a name in common, or a piece is missing.
    """
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


def parameter_places(sources: Sequence[Any], places: Mapping[str, Place]) -> dict[str, Place]:
    """Where modules that were split have their parameters; one with several names is where the first of them is.

    places: of all names of these modules.
    """
    names: dict[int, list[str]] = {}
    for piece in filter(None, map(_piece_of, sources)):
        for name, parameter in piece.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return {name: min(places[alias] for alias in aliases) for aliases in names.values() for name in aliases}


def outer_name(name: str, sources: Sequence[Any]) -> str:
    """What users call the parameter that is `name` inside."""
    index, inner = name.split(".", 1)
    return name if _piece_of(sources[int(index)]) is None else inner


def in_order(state: Mapping[str, Any], places: Mapping[str, Place]) -> dict[str, Any]:
    """By the names that users see, in the order of a whole model; `places` is that of modules that were split."""
    return dict(sorted(state.items(), key=lambda item: places.get(item[0]) or (int(item[0].split(".", 1)[0]), 0)))


def _piece_of(source: Any) -> Piece | None:
    layer = source.module if isinstance(source, FromFunction) else source
    while isinstance(layer, Wrapper) and not isinstance(layer, Piece):
        layer = layer.layer
    return layer if isinstance(layer, Piece) else None
