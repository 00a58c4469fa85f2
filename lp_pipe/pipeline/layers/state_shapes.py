"""Checks that the tensors of a state have the names and shapes of the model that is to load them."""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import errors_of_reading, reads_own_state


def check_names(given: Collection[str], known: Collection[str], what: str, advice: str = "") -> None:
    """Refuse a state with other names than the model's.

    Raises:
        PipelineError: names are missing or unknown.
    """
    missing, unknown = sorted({*known} - {*given}), sorted({*given} - {*known})
    if missing or unknown:
        raise PipelineError(f"{what} of another model: missing {missing[:3]}, unknown {unknown[:3]}{advice}")


def check_shapes(
    state: Mapping[str, Any],
    own: Mapping[str, Any],
    what: str,
    fitting: Callable[[dict[str, Tensor]], Collection[str]],
) -> None:
    """Refuse, before anything is changed, a state at which load_state_dict would fail halfway.

    fitting: returns which names of tensors with another shape than in `own` the modules take even so.

    Raises:
        PipelineError: a value has another shape, or is no tensor.
    """
    for name, value in own.items():
        if isinstance(value, Tensor) and not isinstance(state[name], Tensor):
            raise PipelineError(f"{what} of another model: {name} is a {type(state[name]).__name__} there, no tensor")
    for name in shape_mismatches(state, own, fitting):
        shapes = f"shape {list(state[name].shape)} there and {list(own[name].shape)} here"
        raise PipelineError(f"{what} of another model: {name} has {shapes}")


def shape_mismatches(
    state: Mapping[str, Any], own: Mapping[str, Any], fitting: Callable[[dict[str, Tensor]], Collection[str]]
) -> list[str]:
    """Return the names of tensors with another shape than in `own` that no module takes.

    fitting: as in `check_shapes`.
    """
    tensors = {name: state[name] for name, value in own.items() if isinstance(value, Tensor) and name in state}
    others = {name: value for name, value in tensors.items() if getattr(value, "shape", None) != own[name].shape}
    fits = fitting(others) if others else ()
    return [name for name in others if name not in fits]


def accepted_by_modules(named_layers: Iterable[tuple[str, nn.Module]], state: Mapping[str, Tensor]) -> set[str]:
    """Return which of these tensors, of other shapes than the layers', the layers' modules would take.

    Modules that read a state in their own way may, such as observers of quantisation, which make their ranges as long
    as a weight has channels once they have seen it.

    named_layers: with the prefixes of their names in the state.
    """
    taken: set[str] = set()
    for prefix, layer in named_layers:
        for path, module in layer.named_modules(prefix=prefix.removesuffix(".")):
            own = {name: value for name, value in state.items() if name.rpartition(".")[0] == path}
            if own and reads_own_state(module):
                errors = errors_of_reading(copy.deepcopy(module), own, path + "." if path else "")
                taken |= own.keys() if not errors else set()
    return taken
