"""The last states of all parts in the memory of processes that live on when one dies."""

import copy
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from lp_pipe.checkpoint.parts import mirrors_itself, saves_itself
from lp_pipe.context import NodeServices
from lp_pipe.errors import StateLost
from lp_pipe.launched import services_for
from lp_pipe.rpc.client import CourierClient, address_of, start_without_state


class _Cut(NamedTuple):
    """All parts at one moment, in memory. mirrored: which state, of parts that keep it themselves."""

    step: int
    mirrored: dict[str, int]
    states: dict[str, Any]


class StatesInMemory:
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


_log = logging.getLogger(__name__)


class LostParts:
    """The nodes of the program among the parts of its checkpoints.

    From the first `watch` on, such a node that was started again refuses every call until its state was loaded
    (`rpc/server.py`), so that no caller ever gets an answer from the initial state. A training that does not call the
    node would find out late. So the launcher also tells of each death, and `loss` costs no round trip.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._clients = {name: part for name, part in parts.items() if isinstance(part, CourierClient)}
        self._addresses: dict[NodeServices, list[str]] = {}
        for client in self._clients.values():
            address = address_of(client)
            services = services_for(address) if address is not None else None
            if address is not None and services is not None:
                self._addresses.setdefault(services, []).append(address)
        self._losses: dict[NodeServices, Future[str]] = {}

    def watch(self) -> None:
        """Begin to watch, at first and after all parts were restored."""
        for services, addresses in self._addresses.items():
            if services not in self._losses or self._losses[services].done():
                self._losses[services] = services.watch_state(addresses)

    def loss(self) -> StateLost | None:
        """Return what tells of a part that has died since `watch`; None if none is known to have died."""
        for loss in self._losses.values():
            if loss.done() and loss.exception() is None:
                return StateLost(f"{loss.result()} has died and is started again: it has lost its state")
        return None

    def begin_as_built(self) -> None:
        """Take the initial state of lost parts for the beginning: nothing was trained, and there is no checkpoint."""
        for name, client in self._clients.items():
            if start_without_state(client):
                _log.warning(
                    "part %r was started again before there was a checkpoint: it begins with its initial state", name
                )
