"""Consecutive layers of a model, with the names of parameters that users see.

Inside a pipeline a parameter is named as in nn.Sequential(*layers), "2.weight", so that its name gives the layer. Users
see the same names, except in the pieces of a split module: these have the names that the module gave them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.model import FromFunction
from lp_pipe.pipeline.layers.model_names import ModelNames, StatePlace, formats_of, noted, with_formats
from lp_pipe.pipeline.layers.piece import Piece
from lp_pipe.pipeline.layers.wrapper import Wrapper
from lp_pipe.private_torch import buffers_of, put_buffer, state_version_of
from lp_pipe.rpc.tensor_memory import overlaps


class NamedLayers:
    """Consecutive layers of a model.

    first_layer: the first one's index in the model.
    borrowed: parameters among theirs that other stages own.
    """

    def __init__(
        self, layers: Sequence[nn.Module], first_layer: int = 0, borrowed: Collection[nn.Parameter] = ()
    ) -> None:
        self.layers = layers
        self.first_layer = first_layer
        self._borrowed = borrowed

    @property
    def last_layer(self) -> int:
        """The last layer's index in the model."""
        return self.first_layer + len(self.layers) - 1

    def modules(self) -> list[nn.Module]:
        """Return the layers and all modules in them; a module that several layers share is there for each."""
        return [module for layer in self.layers for module in layer.modules()]

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the layers and all modules in them, under the names that their parameters begin with."""
        for prefix, layer in self.named_layers():
            yield from layer.named_modules(prefix=prefix.removesuffix("."))

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the layers, each with the prefix of the names that users see."""
        for index, layer in enumerate(self.layers, start=self.first_layer):
            yield name_prefix(index, layer), layer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the own parameters under the names that users see; a shared one once."""
        seen = {id(parameter) for parameter in self._borrowed}
        for prefix, layer in self.named_layers():
            for name, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield prefix + name, parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers under the names that users see; buffers are copied, parameters are not.

        A tensor that has been sent or written to a file cannot be resized any more, as a forward may do with a buffer.
        """
        state: dict[str, Any] = {}
        for prefix, layer in self.named_layers():
            layer.state_dict(destination=state, prefix=prefix, keep_vars=True)
        return {name: _given_away(value) if isinstance(value, Tensor) else value for name, value in state.items()}

    def formats(self) -> dict[str, int]:
        """Return the versions of the modules in the state, if they are not the first."""
        named = [(prefix.removesuffix("."), layer) for prefix, layer in self.named_layers()]
        modules = [m for prefix, layer in named for m in layer.named_modules(prefix=prefix, remove_duplicate=False)]
        return noted((name, state_version_of(module)) for name, module in modules)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy these layers' part of a whole model's state into them.

        Raises:
            RuntimeError: names are missing or shapes differ, in torch's words.
        """
        formats = formats_of(state)
        for prefix, layer in self.named_layers():
            # a piece of a split module has no prefix
            own = state if prefix else {name: state[name] for name in layer.state_dict()}
            values = {name.removeprefix(prefix): v for name, v in own.items() if name.startswith(prefix)}
            of_modules = {name[len(prefix) :]: v for name, v in formats.items() if f"{name}.".startswith(prefix)}
            _make_writable(layer)
            layer.load_state_dict(with_formats(values, of_modules))


def _make_writable(layer: nn.Module) -> None:
    """Replace expanded buffers: their elements share memory, so torch cannot copy into them."""
    for module in layer.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.layout is torch.strided and overlaps(buffer):
                put_buffer(module, name, buffer.clone(memory_format=torch.contiguous_format))


def _given_away(value: Tensor) -> Tensor:
    return value.detach() if isinstance(value, nn.Parameter) else value.detach().clone()


def name_prefix(index: int, layer: nn.Module) -> str:
    """Return what comes before the names that a layer gives its parameters."""
    return "" if _piece_of(layer) is not None else f"{index}."


def model_names(sources: Sequence[Any], tied: Sequence[Sequence[str]]) -> ModelNames:
    """Return the names of a model with these layers.

    tied: by the names inside, all names of each parameter that has several.

    Raises:
        PipelineError: two modules that were split have a name in common, or a piece is missing.
    """
    places = _own_places(sources)
    outside = tuple(tuple(_outer_name(name, sources) for name in names) for names in tied)
    return ModelNames(outside, places, _parameter_places(sources, places))


def _own_places(sources: Sequence[Any]) -> dict[str, StatePlace]:
    """Return the places of all names of split modules.

    All pieces of a module count as its first, so the module's own order holds.
    """
    pieces = {index: piece for index, source in enumerate(sources) if (piece := _piece_of(source)) is not None}
    origins: dict[str, str] = {}
    places: dict[str, StatePlace] = {}
    for index, piece in pieces.items():
        for position, name in enumerate(piece.order):
            head = name.split(".", 1)[0]
            taken = head.isdecimal() and int(head) < len(sources) and int(head) not in pieces
            if taken or origins.setdefault(name, piece.origin) != piece.origin:
                raise PipelineError(
                    f"layer {index} is a piece of a split module, and its {name!r} is also a name in another layer: "
                    "give the module's submodules other names"
                )
            places.setdefault(name, (index, position))
    present = {name for piece in pieces.values() for name in piece.state_dict()}
    if not places.keys() <= present:
        missing = sorted(places.keys() - present)[0]
        raise PipelineError(f"a piece of a split module is missing among the layers: the one with {missing!r}")
    return places


def _parameter_places(sources: Sequence[Any], places: Mapping[str, StatePlace]) -> dict[str, StatePlace]:
    names: dict[int, list[str]] = {}
    for piece in filter(None, map(_piece_of, sources)):
        for name, parameter in piece.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return {name: min(places[alias] for alias in aliases) for aliases in names.values() for name in aliases}


def _outer_name(name: str, sources: Sequence[Any]) -> str:
    """Return the user's name of the parameter that is `name` inside."""
    index, inner = name.split(".", 1)
    return name if _piece_of(sources[int(index)]) is None else inner


def _piece_of(source: Any) -> Piece | None:
    layer = source.module if isinstance(source, FromFunction) else source
    while isinstance(layer, Wrapper) and not isinstance(layer, Piece):
        layer = layer.layer
    return layer if isinstance(layer, Piece) else None


@contextmanager
def eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put the modules into eval mode in the body; afterwards each has its own mode again."""
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
