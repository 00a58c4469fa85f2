"""The lists in a scheduler's state that have one entry for each parameter group, taken apart and put together.

Stages have other groups than each other (one a layer, for a learning rate that decays with depth), and other cuts have
others again: what belongs to a group goes along with the parameters in it.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NAMES = ("lrs", "_last_lr", "lr_lambdas", "momentums")  # torch's all end so; a user's own: peak_lrs, warmup_lrs
Path = tuple[str | int, ...]


def values_of_group(state: Mapping[str, Any], groups: int, group: int) -> dict[Path, Any]:
    """What a scheduler's state says of one group, by the way to the list."""
    return {path: found[group] for path, found in _lists(state, ()) if len(found) == groups}


def with_group_values(
    saved: Mapping[str, Any], own: Mapping[str, Any], values: Sequence[Mapping[Path, Any] | None]
) -> dict[str, Any]:
    """A saved state for a scheduler whose own state is `own`; what nobody has saved of a group stays as it is.

    values: what was saved of each of its groups; None for one without parameters.
    """
    state = copy.deepcopy(dict(saved))
    for path, found in _lists(own, ()):
        if len(found) == len(values):
            fresh = [given.get(path, now) if given else now for given, now in zip(values, found, strict=True)]
            _put(state, path, fresh)
    return state


def _lists(state: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, list[Any]]]:
    for key, value in state.items():
        if str(key).endswith(_NAMES) and isinstance(value, list):
            yield (*path, key), value
        elif isinstance(value, Mapping):
            yield from _lists(value, (*path, key))
        elif isinstance(value, (list, tuple)):  # the schedulers in a SequentialLR
            for index, part in enumerate(value):
                if isinstance(part, Mapping):
                    yield from _lists(part, (*path, key, index))


def _put(state: Any, path: Path, value: list[Any]) -> None:
    *way, last = path
    try:
        for step in way:
            state = state[step]
    except (KeyError, IndexError, TypeError):
        return  # of another kind of scheduler, about which its load_state_dict decides
    state[last] = value
