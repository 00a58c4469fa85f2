"""Consecutive layers of a model, with the names that users see of what is in them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.pipeline.layers.formats import formats_of, noted, with_formats
from lp_pipe.pipeline.layers.names import name_prefix
from lp_pipe.private_torch import buffers_of, put_buffer, state_version_of
from lp_pipe.rpc.tensor_memory import overlaps


class NamedLayers:
    """first_layer: the first one's index in the model. borrowed: those parameters that others own."""

    def __init__(
        self, layers: Sequence[nn.Module], first_layer: int = 0, borrowed: Collection[nn.Parameter] = ()
    ) -> None:
        self.layers = layers
        self.first_layer = first_layer
        self._borrowed = borrowed

    @property
    def last_layer(self) -> int:
        """Its index in the model."""
        return self.first_layer + len(self.layers) - 1

    def modules(self) -> list[nn.Module]:
        """The layers, and all that is inside of them; what several layers share is there for each."""
        return [module for layer in self.layers for module in layer.modules()]

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers and all that is inside of them, under the names that their parameters begin with."""
        for prefix, layer in self.named_layers():
            yield from layer.named_modules(prefix=prefix.removesuffix("."))

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """With what the names that users see begin with."""
        for index, layer in enumerate(self.layers, start=self.first_layer):
            yield name_prefix(index, layer), layer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Own parameters under the names that users see; a shared one once."""
        seen = {id(parameter) for parameter in self._borrowed}
        for prefix, layer in self.named_layers():
            for name, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield prefix + name, parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers under the names that users see; not copies of the parameters.

        But of buffers: a tensor that has been sent or written to a file cannot be resized any more, as a forward may.
        """
        state: dict[str, Any] = {}
        for prefix, layer in self.named_layers():
            layer.state_dict(destination=state, prefix=prefix, keep_vars=True)
        return {name: _given_away(value) if isinstance(value, Tensor) else value for name, value in state.items()}

    def formats(self) -> dict[str, int]:
        """Of what is in the state."""
        named = [(prefix.removesuffix("."), layer) for prefix, layer in self.named_layers()]
        modules = [m for prefix, layer in named for m in layer.named_modules(prefix=prefix, remove_duplicate=False)]
        return noted((name, state_version_of(module)) for name, module in modules)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy these layers' part of a whole model's state in.

        Raises:
            RuntimeError: names are missing or shapes differ, as torch says it.
        """
        formats = formats_of(state)
        for prefix, layer in self.named_layers():
            own = state if prefix else {name: state[name] for name in layer.state_dict()}  # of a piece, no more
            values = {name.removeprefix(prefix): v for name, v in own.items() if name.startswith(prefix)}
            of_modules = {name[len(prefix) :]: v for name, v in formats.items() if f"{name}.".startswith(prefix)}
            _make_writable(layer)
            layer.load_state_dict(with_formats(values, of_modules))


def _make_writable(layer: nn.Module) -> None:
    """Expanded buffers, whose elements share memory: torch cannot copy into these."""
    for module in layer.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.layout is torch.strided and overlaps(buffer):
                put_buffer(module, name, buffer.clone(memory_format=torch.contiguous_format))


def _given_away(value: Tensor) -> Tensor:
    return value.detach() if isinstance(value, nn.Parameter) else value.detach().clone()
