"""The last states of all parts in the memory of processes that live on when one dies."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from lp_pipe.checkpoint.parts import mirrors_itself, saves_itself


class _Cut(NamedTuple):
    """All parts at one moment, in memory. mirrored: which state, of parts that keep it themselves."""

    step: int
    mirrored: dict[str, int]
    states: dict[str, Any]


class InMemory:
    """Of the parts of a program, between two steps. Pipelines keep their states themselves; others' are here."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._cuts: list[_Cut] = []

    def keep(self, step: int) -> None:
        """All parts as they are now, after so many steps, and as they were the time before."""
        self._cuts = [cut for cut in self._cuts if cut.step != step]  # its mirrors are about to be other ones
        mirrored = {name: part.mirror() for name, part in self._parts.items() if mirrors_itself(part)}
        others = {name: part for name, part in self._parts.items() if name not in mirrored}
        states = {name: copy.deepcopy(part.state_dict()) for name, part in others.items()}
        self._cuts = [*self._cuts[-1:], _Cut(step, mirrored, states)]

    def go_back(self, *, least: int) -> int | None:
        """Go on from the newest state that is there of all parts; returns its step, None if none has so many steps."""
        held = {name: part.mirrored_steps() for name, part in self._parts.items() if mirrors_itself(part)}
        while self._cuts and self._cuts[-1].step >= least:
            step_of_cut, mirrored, states = self._cuts[-1]
            if all(step in held[name] for name, step in mirrored.items()):
                for name, step in mirrored.items():
                    self._parts[name].go_back(step)
                for name, state in states.items():
                    self._parts[name].load_state_dict(copy.deepcopy(state))
                return step_of_cut
            self._cuts.pop()
        return None

    def forget(self) -> None:
        """The parts have another state now, of which these are no past."""
        self._cuts = []


def check_can_mirror(every: int, parts: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: a number below 1, or a part whose state is only ever on the disk.
    """
    if every < 1:
        raise ValueError(f"mirror_every={every}: it is a number of steps, at least 1")
    for name, part in parts.items():
        if saves_itself(part) and not mirrors_itself(part):
            raise ValueError(f"mirror_every: part {name!r} has no mirror() and no state_dict()")
