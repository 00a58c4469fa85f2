"""A layer inside another module that does not show in the names of its parameters."""

from collections.abc import Iterator
from typing import Any, Self

from torch import nn

from lp_pipe.pipeline.layers.model import Layer


class Wrapper(nn.Module):
    """A module around `layer`: a module, a pp.Layer that its stage builds, or another Wrapper."""

    goes_by_its_layer = False  # in profiles, plans and messages

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if not isinstance(layer, (nn.Module, Layer)):
            raise TypeError(f"{type(self).__name__} takes a module or a pp.Layer, not {layer!r}")
        self.layer: Any = layer

    def around(self, layer: Any) -> Self:
        """Return the same wrapper around another layer."""
        raise NotImplementedError

    @property
    def is_built(self) -> bool:
        return self.layer.is_built if isinstance(self.layer, Wrapper) else isinstance(self.layer, nn.Module)

    def build(self) -> Self:
        """Return the same wrapper around the module that the pp.Layer builds; the caller seeds the generator."""
        return self.around(self.layer.build())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module and the layer's modules; both have one name, so names below are as without the wrapper."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            if self.is_built:
                yield from self.layer.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's state_dict."""
        return self.layer.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the layer."""
        return self.layer.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer":
                raise
            return getattr(self.layer, name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}layer.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def unwrapped(layer: nn.Module) -> nn.Module:
    """Return the layer inside all wrappers."""
    return unwrapped(layer.layer) if isinstance(layer, Wrapper) else layer
