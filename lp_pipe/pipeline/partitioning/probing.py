"""Find the fastest plan with a search that, for a time, finds some plan that takes no longer."""

from collections.abc import Callable
from typing import TypeVar

Stage = TypeVar("Stage")

_ANY = 1e200  # seconds: whatever it takes
_NEAR = 0.001  # more of a time counts as none
_PROBES = 8
_ATTEMPTS = 40


def fastest_found(
    within: Callable[[float], list[Stage]], takes: Callable[[list[Stage]], float], least: float
) -> list[Stage]:
    """The fastest stages that are found, or what `within` finds where there are none.

    least: seconds that no plan beats. takes: seconds of one that is found.
    """
    start = least
    for farther in range(_PROBES):  # what is found is mostly near to the bound
        limit = start * (1 + _NEAR * 4**farther) if farther < _PROBES - 1 else _ANY
        best = within(limit)
        if best:
            break
        least = limit
    known = takes(best) if best else least
    for _ in range(_ATTEMPTS):
        if known <= least * (1 + _NEAR):
            break
        limit = (least + known) / 2
        found = within(limit)
        if found:
            best, known = found, min(limit, takes(found))
        else:
            least = limit
    return best
