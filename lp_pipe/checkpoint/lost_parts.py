"""Parts whose process has died and was started again without their state."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from lp_pipe.context import NodeServices
from lp_pipe.errors import StateLost
from lp_pipe.launched import services_for
from lp_pipe.rpc.client import CourierClient, address_of, start_without_state

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
