"""Recovery without reading a disk: copies of all parts' states in memory, and the parts that have lost their state."""

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
    """The states of all parts after `step` steps.

    mirrored: the mirror's number, of parts that keep their states themselves. states: the others' states.
    """

    step: int
    mirrored: dict[str, int]
    states: dict[str, Any]


class StatesInMemory:
    """The newest two states of a program's parts, in memory. Pipelines keep their states themselves."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._cuts: list[_Cut] = []

    def keep(self, step: int) -> None:
        """Keep the state of all parts as it is now, after `step` steps, and the state that was kept before."""
        self._cuts = [cut for cut in self._cuts if cut.step != step]  # mirror() replaces the mirrors of this step
        mirrored = {name: part.mirror() for name, part in self._parts.items() if mirrors_itself(part)}
        others = {name: part for name, part in self._parts.items() if name not in mirrored}
        states = {name: copy.deepcopy(part.state_dict()) for name, part in others.items()}
        self._cuts = [*self._cuts[-1:], _Cut(step, mirrored, states)]

    def go_back(self, *, least: int) -> int | None:
        """Restore the newest state that all parts still have; return its step, or None if none has `least` steps."""
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
        """Drop all states: the parts were restored from elsewhere."""
        self._cuts = []


def check_can_mirror(every: int, parts: Mapping[str, Any]) -> None:
    """Check that every part's state can be kept in memory.

    Raises:
        ValueError: `every` is below 1, or a part can only write its state to the disk.
    """
    if every < 1:
        raise ValueError(f"mirror_every must be at least 1 step, got mirror_every={every}")
    for name, part in parts.items():
        if saves_itself(part) and not mirrors_itself(part):
            raise ValueError(
                f"mirror_every cannot keep part {name!r} in memory: it has no mirror() and no state_dict()"
            )


_log = logging.getLogger(__name__)


class LostParts:
    """A watch over those parts of a checkpoint that are nodes of the program.

    After the first `watch`, a part's node that is restarted refuses every call until its state is loaded
    (`rpc/server.py`), so no caller gets an answer from the initial state. A training loop that does not call the node
    would notice late. So the launcher also reports each death, and `loss` costs no round trip.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        clients = {name: _client_of(part) for name, part in parts.items()}
        self._clients = {name: client for name, client in clients.items() if client is not None}
        self._addresses: dict[NodeServices, list[str]] = {}
        for client in self._clients.values():
            address = address_of(client)
            services = services_for(address) if address is not None else None
            if address is not None and services is not None:
                self._addresses.setdefault(services, []).append(address)
        self._losses: dict[NodeServices, Future[str]] = {}

    def watch(self) -> None:
        """Start to watch; called at the beginning and after all parts were restored."""
        for services, addresses in self._addresses.items():
            if services not in self._losses or self._losses[services].done():
                self._losses[services] = services.watch_state(addresses)

    def loss(self) -> StateLost | None:
        """Return an error that names a part which has died since `watch`; None if no death is known."""
        for loss in self._losses.values():
            if loss.done() and loss.exception() is None:
                return StateLost(f"{loss.result()} has died and is restarted: it has lost its state")
        return None

    def begin_as_built(self) -> None:
        """Let lost parts serve their initial state: nothing was trained yet, and there is no checkpoint."""
        for name, client in self._clients.items():
            if start_without_state(client):
                _log.warning(
                    "part %r was restarted before there was a checkpoint: it starts with its initial state", name
                )


def _client_of(part: Any) -> CourierClient | None:
    """Return the client of the node whose state the part is: itself, or what a part that saves itself writes with."""
    if saves_itself(part):
        part = getattr(part, "courier_client", None)
    return part if isinstance(part, CourierClient) else None
