"""Whether the tensors of a state have the names and shapes of the model that is to take them."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lp_pipe.errors import PipelineError


def check_names(given: Collection[str], known: Collection[str], what: str) -> None:
    """
    Raises:
        PipelineError: names are missing or unknown.
    """
    missing, unknown = sorted({*known} - {*given}), sorted({*given} - {*known})
    if missing or unknown:
        raise PipelineError(f"{what} of another model: missing {missing[:3]}, unknown {unknown[:3]}")


def check_shapes(state: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    """Refuse before anything was changed what load_state_dict would refuse in the middle.

    Raises:
        PipelineError: a tensor has another shape, or is none.
    """
    for name, value in own.items():
        if isinstance(value, Tensor) and not isinstance(state[name], Tensor):
            raise PipelineError(f"{what} of another model: {name} is a {type(state[name]).__name__} there, no tensor")
        if isinstance(value, Tensor) and state[name].shape != value.shape:
            shapes = f"shape {list(state[name].shape)} there and {list(value.shape)} here"
            raise PipelineError(f"{what} of another model: {name} has {shapes}")
