"""Hosts that come and go while a program runs, and may outlive it."""

import contextlib
import logging
import threading
import time

from lp_pipe.connections import Listener
from lp_pipe.connections.credentials import Credentials
from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import HostOffer, Invitation, StartedAgent
from lp_pipe.launch.hosts.host_join import HostJoin, MultiHostOptions, RemoteAgent
from lp_pipe.launch.hosts.relocation import fence_s

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_BRING_BACK_EVERY_S = 5.0


class ElasticHosts(HostJoin):
    """Agents may join at any time: those that were lost, and others that know the run's secret.

    is_for_programs: whether the hosts outlive a program, for the next one.
    losses: how many hosts were lost so far; lost_at: when the last one was (time.monotonic).
    """

    losses = 0
    lost_at = 0.0
    _invitation: Invitation

    def __init__(self, options: MultiHostOptions, credentials: Credentials, *, is_for_programs: bool) -> None:
        super().__init__(options, credentials)
        self._is_for_programs = is_for_programs
        self._listener: Listener | None = None
        self._threads: list[threading.Thread] = []

    def start_and_wait(self, log_dir: str, needs_torch: bool) -> dict[str, RemoteAgent]:
        """Start the agents and wait for them; by host. Those that have not joined in time may join later.

        Raises:
            LaunchError: none has joined.
        """
        self.open(log_dir, needs_torch)
        agents = self.wait_for(1, is_first=True, is_stopping=self._is_over)
        if missing := [name for name in self._offers if name not in agents]:
            _log.warning("%s", self._hosts_not_joined(missing, self.patience.join_s))
        return agents

    def open(self, log_dir: str, needs_torch: bool) -> None:
        """Start the agents; returns at once.

        Raises:
            LaunchError: one cannot be started.
        """
        self._needs_torch = needs_torch
        self._fenced_until = 0.0
        listener, self._invitation = self._listen_for_agents(log_dir)
        self._listener = listener
        try:
            self._watched = self._engine.start(self._invitation)
        except BaseException:
            listener.close()
            raise
        self._threads = [
            threading.Thread(target=self._be_alive, name="launcher is alive", daemon=True),
            threading.Thread(target=self._bring_back, name="lost hosts come back", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def up(self) -> dict[str, RemoteAgent]:
        """Return the hosts that have joined and are not lost; those of the engine first."""
        with self._changed:
            return {name: self._agents[name] for name in self._offers if name in self._agents}

    def wait_for(self, least: int, is_first: bool, is_stopping: threading.Event) -> dict[str, RemoteAgent]:
        """Wait until so many hosts are up, and nothing can be left of the nodes of lost ones.

        The first wait is until all have joined that may. Returns at once, with fewer hosts, when the run is stopping.

        Raises:
            LaunchError: there were not so many in time.
        """
        began = time.monotonic()
        deadline = began + self.patience.join_s
        while not is_stopping.is_set():
            up = self.up()
            is_late = time.monotonic() >= deadline
            missing = [name for name in self._offers if name not in up]
            ended = {name for one in self._watched if one.how_it_ended() is not None for name in one.hosts}
            is_coming = is_first and not is_late and not ended.issuperset(missing)
            is_clear = time.monotonic() >= self._fenced_until
            if len(up) >= least and not is_coming and is_clear:
                break
            if len(up) < least and (is_late or (is_first and missing and not is_coming)):
                why = self._hosts_not_joined(missing, time.monotonic() - began)
                raise LaunchError(f"{len(up)} hosts are up, at least {least} are needed. {why}")
            with self._changed:
                self._changed.wait(_LOOK_EVERY_S)
        return self.up()

    def release(self, patience_s: float) -> None:
        if not self._is_for_programs:
            self.close(patience_s)
            return
        with self._changed:
            self._on_lost, self._on_joined = None, lambda agent: None

    def close(self, patience_s: float) -> None:
        if self._listener is not None:
            self._listener.close()
        super().close(patience_s)
        for thread in self._threads:
            thread.join(patience_s)

    def lost(self, agent: RemoteAgent, reason: str) -> None:
        if self._is_over.is_set():
            return
        with self._changed:
            if self._agents.get(agent.name) is agent:
                del self._agents[agent.name]
            self.lost_at = time.monotonic()
            self.losses += 1
            self._fenced_until = max(self._fenced_until, self.lost_at + fence_s(agent.is_silent))
        super().lost(agent, reason)

    def _check_is_expected(self, host: str) -> None:
        self._offers.setdefault(host, HostOffer(host))

    def _bring_back(self) -> None:
        while not self._is_over.wait(_BRING_BACK_EVERY_S):
            self._watched = [self._again(one) for one in self._watched]

    def _again(self, watched: StartedAgent) -> StartedAgent:
        """Return the agent that stands for the same host now, started again if it has ended."""
        if len(watched.hosts) > 1 or watched.hosts[0] in self.up():
            return watched
        name = watched.hosts[0]
        if watched.how_it_ended() is None:
            if name not in self._lost:
                return watched  # its agent is starting
            watched.kill()
        with contextlib.suppress(LaunchError):  # it is tried again later
            again = self._engine.start_again(self._invitation, name)
            if again is not None:
                self._lost.discard(name)  # from now on it is one that starts, however long that takes
                return again
        return watched
