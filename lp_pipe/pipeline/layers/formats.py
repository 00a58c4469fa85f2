"""The versions of what modules save. torch notes them beside a state's tensors, in `state_dict()._metadata`.

A module that saves something else than it did once (a transposed weight) tells by them what it is given, in its
`_load_from_state_dict`; where nothing is noted, mostly that it is old. Needs no torch.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any


def formats_of(state: Mapping[str, Any]) -> dict[str, int]:
    """By module; of the first version, and of a state that was put together without them, nothing is said."""
    metadata: Mapping[str, Any] = getattr(state, "_metadata", None) or {}
    return noted((name, of_module.get("version")) for name, of_module in metadata.items())


def noted(versions: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Those of which something must be said."""
    return {name: version for name, version in versions if isinstance(version, int) and version != 1}


def with_formats(state: Mapping[str, Any], formats: Mapping[str, int]) -> "OrderedDict[str, Any]":
    """The state as torch would have made it."""
    result: OrderedDict[str, Any] = OrderedDict(state)
    metadata = OrderedDict((name, {"version": version}) for name, version in formats.items())
    result._metadata = metadata  # type: ignore[attr-defined]
    return result
