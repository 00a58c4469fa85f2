"""The hosts of a run's nodes, and the move of the nodes of a lost host to another one.

    host lost ── failure "HostLost" ── wait until nothing of the nodes can be left there ── "down" ── restart elsewhere

The wait is the fence: two processes must never be one node, and a lost host cannot be asked. Its nodes end
by themselves: at the death of their agent, or when that has heard nothing of the launcher for a while.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.host_placement import HostPlacement, place_again, place_late
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.lifecycle import LAUNCHER_PATIENCE_S, ORPHAN_S
from lp_pipe.launch.supervision.messages import Failure

_log = logging.getLogger(__name__)

_SLACK_S = 1.0
_SILENCE_TICKS = 1.25  # a silence is noticed at most a quarter of its time too late (connections/io_thread.py)
_ORPHAN_S = 1.0  # in place of ORPHAN_S if nodes on other hosts wait for the end
_OVER = ("finished", "failed", "stopped")


def orphan_s(nodes: Iterable[NodeSpec], is_elastic: bool) -> float:
    """Return the seconds that nodes have to end when their agent is dead; few where other hosts take their place."""
    is_waited_for = is_elastic or any(spec.may_start_again or spec.least_started for spec in nodes)
    return _ORPHAN_S if is_waited_for else ORPHAN_S


def fence_s(is_silent: bool) -> float:
    """Return the seconds after which nothing can be left of the nodes of a lost host.

    is_silent: it may be alive, and only cut off; else its connection has ended, with its agent.
    """
    return (LAUNCHER_PATIENCE_S * _SILENCE_TICKS if is_silent else 0.0) + _ORPHAN_S + _SLACK_S


class Relocation:
    """Thread-safe. hardware: of the hosts that are up, by name; places: of the nodes that have room, by node_id.

    only_spares: nodes may only go to hosts that have none.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        hardware: Mapping[str, Hardware],
        places: Mapping[str, HostPlacement],
        coordinator: Coordinator,
        only_spares: bool = False,
    ) -> None:
        self._only_spares = only_spares
        self._nodes = {spec.node_id: spec for spec in nodes}
        self._hardware = dict(hardware)
        self._places = dict(places)
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._fenced: dict[str, float] = {}  # until when (time.monotonic) a node may still run on a lost host
        self._new: set[str] = set()  # nodes that the agent of their host does not know yet
        self._timers: list[threading.Timer] = []
        self._late_hosts: dict[str, float] = {}  # that have joined the running program: when (time.monotonic)
        self._lost_nodes: dict[str, tuple[float, float]] = {}  # when their host was lost, and from when they may start

    def place_of(self, node_id: str) -> HostPlacement:
        return self._places[node_id]

    def host_of(self, node_id: str) -> str:
        """Return the host's name; "" for a node that has had no room so far."""
        return self._places[node_id].host if node_id in self._places else ""

    def is_fenced(self, node_id: str) -> bool:
        """Return whether the node must not be started now; it will be due once more."""
        with self._lock:
            return node_id in self._fenced

    def take_new(self, node_id: str) -> bool:
        """Return, once for each move, whether the agent of the node's host does not know the node yet."""
        with self._lock:
            is_new = node_id in self._new
            self._new.discard(node_id)
            return is_new

    def lose(self, host: str, why: str, is_silent: bool) -> None:
        """The host is lost. Its nodes fail; those that may start again are given other places, if there are any."""
        failure = Failure("HostLost", why)
        now = time.monotonic()
        until = now + fence_s(is_silent)
        with self._lock:
            self._hardware.pop(host, None)
            self._late_hosts.pop(host, None)
            lost = [spec for spec in self._nodes.values() if self.host_of(spec.node_id) == host]
            states = self._coordinator.states()
            moving = [spec for spec in lost if spec.may_start_again and states[spec.node_id] not in _OVER]
            if moving and (problem := self._move(moving, states)):
                moving, failure = [], Failure("HostLost", f"{why}; its nodes cannot start on another host: {problem}")
            fenced = [spec.node_id for spec in moving if not self._coordinator.is_gone(spec.node_id)]
            self._fenced.update((node_id, max(until, self._fenced.get(node_id, until))) for node_id in fenced)
            left = [spec.node_id for spec in lost if spec.least_started and spec not in moving]
            self._lost_nodes.update((node_id, (now, until)) for node_id in left)
        for spec in lost:
            self._coordinator.node_ended(spec.node_id, failure, can_restart=spec in moving)
        for spec in lost:
            if spec not in moving or self._coordinator.must_end(spec.node_id):
                self._down([spec.node_id])
        if left:
            self._start_timer(until, lambda: self._start_where_hosts_came(left))
        if moving:
            self._start_timer(until, lambda: self._unfence(until, fenced, failure))
            where = ", ".join(f"{spec.node_id} on {self.host_of(spec.node_id)}" for spec in moving)
            _log.warning("what ran on host %r starts again in %g s: %s", host, fence_s(is_silent), where)

    def gain(self, host: str, hardware: Hardware) -> None:
        """Start nodes that are down, or had no room, on a host that has joined."""
        now = time.monotonic()
        with self._lock:
            self._hardware[host], self._late_hosts[host] = hardware, now
        self._start_late(host, self._nodes)

    def _start_where_hosts_came(self, node_ids: Sequence[str]) -> None:
        """Start nodes of a lost host on hosts that have joined since; nothing can be left of the old ones now."""
        for host, joined_at in list(self._late_hosts.items()):
            self._start_late(host, [node_id for node_id in node_ids if self._lost_nodes[node_id][0] < joined_at])

    def _start_late(self, host: str, node_ids: Iterable[str]) -> None:
        now = time.monotonic()
        with self._lock:
            if host not in self._late_hosts:  # it is lost meanwhile
                return
            states = self._coordinator.states()
            down = [
                self._nodes[node_id]
                for node_id in node_ids
                if self._coordinator.may_start_late(node_id) and self._lost_nodes.get(node_id, (0.0, 0.0))[1] <= now
            ]
            staying = [
                spec
                for node_id, spec in self._nodes.items()
                if self.host_of(node_id) in self._hardware and states[node_id] not in (*_OVER, "waiting")
            ]
            found = place_late(down, host, self._hardware[host], staying, self._places)
            self._places.update(found)
            self._new.update(found)
        if found:
            _log.info("host %s has joined and starts %s", host, ", ".join(found))
            self._coordinator.start_late(list(found))

    def give_up(self, node_ids: Iterable[str]) -> None:
        """Give up the restarts of these nodes, and the waits for what may be left of them."""
        with self._lock:
            fenced = self._fenced.keys() & node_ids
        self._down(fenced)

    def close(self) -> None:
        """End all waits for lost hosts, because the run is over."""
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _move(self, moving: Sequence[NodeSpec], states: Mapping[str, str]) -> str:
        """Give them other places; returns what is missing for that. With the lock held."""
        ids = {spec.node_id for spec in moving}
        staying = [
            spec
            for node_id, spec in self._nodes.items()
            if node_id not in ids and states[node_id] not in _OVER and self._places[node_id].host in self._hardware
        ]
        try:
            found = place_again(moving, self._hardware, staying, self._places, self._only_spares)
        except ValueError as error:
            return str(error)
        self._places.update(found)
        self._new.update(ids)
        return ""

    def _start_timer(self, when: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(max(0.0, when - time.monotonic()), work)
        timer.name, timer.daemon = "fence of lost host", True
        self._timers.append(timer)
        timer.start()

    def _unfence(self, when: float, node_ids: Sequence[str], failure: Failure) -> None:
        with self._lock:  # if its new host is lost as well, a node may still run on its first host
            fenced = [node_id for node_id in node_ids if self._fenced.get(node_id, math.inf) <= when]
        for node_id in fenced:
            self._coordinator.node_ended(node_id, failure)  # has no effect unless the node was told to start meanwhile
        self._down(fenced)

    def _down(self, node_ids: Iterable[str]) -> None:
        ids = list(node_ids)
        with self._lock:
            for node_id in ids:
                self._fenced.pop(node_id, None)
        for node_id in ids:
            self._coordinator.node_down(node_id)
