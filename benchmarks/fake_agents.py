"""Many agents in one process, each with nodes that do not exist: for the launcher they are agents like any other.

    python -m benchmarks.fake_agents FIRST COUNT      (started by benchmarks/scale.py)

Everything between the launcher and the nodes' host is the real thing: connection, handshake, link, coordinator's
stand-in. Only the host is fake: it says what a host with running nodes would say. Reads commands from stdin, a line of
JSON each, and answers each with one.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.tcp_endpoint import TLS
from lp_pipe.launch.hosts import agent, handshake
from lp_pipe.launch.hosts.agent_messages import StartNodes
from lp_pipe.launch.hosts.remote_coordinator import RemoteCoordinator
from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.messages import View

PATIENCE_S = 300.0


class FakeHost:
    """A replacement for an agent's ProcessHost, whose nodes run until they are told to stop."""

    def __init__(self, name: str, assignment: StartNodes, coordinator: RemoteCoordinator) -> None:
        self.mark = ""
        self.past_hits: dict[str, int] = {}
        self.addresses = {spec.node_id: spec.addresses[0] for spec in assignment.nodes}
        self._coordinator = coordinator
        self._place = f"hosts:{assignment.run}|{name}/{os.getpid()}|unix:/tmp/lp-12345678"

    def start(self) -> None:
        for number, (node_id, address) in enumerate(self.addresses.items()):
            self._coordinator.tell(node_id, messages.Started(1 << 20))
            endpoint = f"{self._place}/{address}|grpcs:192.0.2.1:{40_000 + number}"
            self._coordinator.tell(node_id, messages.Register(address, endpoint))

    def tick(self, seconds: int) -> None:
        for node_id in self.addresses:
            self._coordinator.tell(node_id, messages.CallsTaken(100 * seconds))

    def stop_nodes(self, node_ids: Iterable[str]) -> None:
        threading.Thread(target=self._end, args=(list(node_ids),), daemon=True).start()

    def _end(self, node_ids: list[str]) -> None:
        for node_id in node_ids:
            self._coordinator.tell(node_id, messages.CodeEnded(None))
            self._coordinator.tell(node_id, messages.Gone())

    def look(self, old_s: float) -> list[View]:
        return [View([], [], [], node_id) for node_id in self.addresses]

    def close(self) -> None:
        """Do nothing."""


class FakeAgent(agent.Agent):
    def _start(self, assignment: StartNodes) -> str:
        self.coordinator = RemoteCoordinator(self._launcher, assignment.payloads)
        host = FakeHost(self.name, assignment, self.coordinator)
        self.host = host  # type: ignore[assignment]
        host.start()
        return host.mark

    @property
    def fake_host(self) -> FakeHost:
        assert isinstance(self.host, FakeHost)
        return self.host


class Crowd:
    """The commands: one public method each."""

    def __init__(self, first: int, count: int) -> None:
        self._names = [f"host{index}" for index in range(first, first + count)]
        self._agents: list[FakeAgent] = []
        self._threads: list[threading.Thread] = []

    def join(self, addresses: list[str], secret: str) -> str:
        """Connect; each agent serves in a thread of its own from now on."""
        credentials = Credentials.from_bytes(secret.encode())
        versions = handshake.Versions.here()
        handshake.Versions.here = lambda: versions  # type: ignore[method-assign] # once for all, not for each

        def join_one(name: str) -> None:
            connection, _ = agent._connect(TLS, addresses, credentials, 60.0, None)
            one = FakeAgent(connection, credentials, name, "192.0.2.1", TLS)
            self._agents.append(one)
            self._threads.append(threading.Thread(target=one.serve))
            self._threads[-1].start()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(join_one, self._names))
        threading.Thread(target=self._tick, daemon=True).start()
        return "joined"

    def registered(self) -> str:
        """Once everything that the nodes have said at their start has arrived at the launcher."""
        while any(one.host is None for one in self._agents):
            time.sleep(0.01)
        last = [list(one.fake_host.addresses.values())[-1:] for one in self._agents]
        self._find([(one, address) for one, found in zip(self._agents, last, strict=True) for address in found])
        return "registered"

    def resolve(self, addresses: dict[str, str], common: str) -> int:
        """Every node asks where its neighbour is, and where the one is that all talk to; returns how many questions."""
        count = len(addresses)
        asked = []
        for one in self._agents:
            for node_id in one.fake_host.addresses:
                label, _, index = node_id.partition("/")
                asked += [(one, addresses[f"{label}/{(int(index) + 1) % count}"]), (one, common)]
        self._find(asked)
        return len(asked)

    def end(self) -> str:
        for thread in self._threads:
            thread.join()
        return "ended"

    def _find(self, asked: list[tuple[FakeAgent, str]]) -> None:
        coordinators = [(one.coordinator, address) for one, address in asked]
        for answer in [coordinator.find(address) for coordinator, address in coordinators if coordinator is not None]:
            assert answer.result(PATIENCE_S).startswith("hosts:")

    def _tick(self) -> None:
        seconds = 0
        while True:
            time.sleep(1.0)
            seconds += 1
            for one in self._agents:
                if one.host is not None:
                    one.fake_host.tick(seconds)


def main() -> None:
    crowd = Crowd(int(sys.argv[1]), int(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        print(json.dumps(getattr(crowd, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main()
