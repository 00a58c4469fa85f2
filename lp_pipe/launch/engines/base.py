"""The interface of an engine: it lists the hosts of a run and starts one agent on each.

    launcher ── Engine.start(invitation) ──► python -m lp_pipe agent --join ADDRESS --name HOST   (on every host)
        ▲                                         │
        └───────────── one mTLS connection ◄──────┘   for placement, starts, exits, logs and stop

A new engine is one file with one subclass of `Engine`. An installed package adds one with an entry point:

    [project.entry-points."lp_pipe.engines"]
    mine = "my_package.engine:MyEngine"
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lp_pipe.telemetry.file_names import file_name
from lp_pipe.telemetry.run_folder import RunFolder


@dataclass(frozen=True)
class HostOffer:
    """A host of the run, and how much of it the run may use.

    name: what `Resources(host=...)` and messages call it. cpus, gpus, memory: None means all that the agent finds
    there; memory is in bytes. labels: in addition to those that the agent finds there.
    """

    name: str
    cpus: int | None = None
    gpus: int | None = None
    memory: int | None = None
    labels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Invitation:
    """The data that an agent needs to join the run.

    addresses: where the launcher may be reached, "HOST:PORT" each. The agent tries them in order.
    secret: gives the right to run code in the run. It goes to the agent's stdin (one line, with nothing after it), or
        into a file of mode 0600 that `--token-file` names. It must never be in arguments, in the environment, or in
        anything that other users can read.
    log_dir: the folder where `AgentProcess` writes the agents' output.
    interface: the network interface (or address) by which the hosts reach each other; "" for that of the launcher.
    transport: the carrier of the traffic between hosts, "tls" or "grpc".
    """

    addresses: Sequence[str]
    secret: bytes = field(repr=False)
    log_dir: str
    interface: str = ""
    transport: str = "tls"

    @property
    def run_folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(Path(self.log_dir).parent)

    def log_path(self, host: str) -> Path:
        """Return the file for the output of the agent of that host."""
        return Path(self.log_dir) / f"{file_name(host)}.log"

    def arguments(self, host: str, token_file: str = "-") -> list[str]:
        """Return the arguments that follow the interpreter on the command line of the agent of `host`.

        token_file: the file with the secret; "-" if the secret comes by stdin.
        """
        interface = ["--interface", self.interface] if self.interface else []
        transport = ["--transport", self.transport] if self.transport != "tls" else []
        join = ["--join", ",".join(self.addresses), "--name", host, *interface, "--token-file", token_file]
        return ["-m", "lp_pipe", "agent", *transport, *join]


class StartedAgent(ABC):
    """A started agent, or a command that runs several agents.

    hosts: the names of the hosts that lose their agents when this ends.
    """

    # How long after an agent's connection closed `how_it_ended` may learn of its end. The error waits for so long.
    LAST_NEWS_S: ClassVar[float] = 0.5

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)

    @abstractmethod
    def how_it_ended(self) -> str | None:
        """Return how it ended, in words ("exit status 255"); None while it runs. Must not block."""

    @abstractmethod
    def last_lines(self) -> list[str]:
        """Return its last lines of output, for the error about an agent that does not join. Must not block."""

    @abstractmethod
    def kill(self) -> None:
        """End it now, as far as the engine can. Idempotent. Returns when it is gone, or after some seconds.

        An agent also ends by itself, with its nodes, when its connection closes.
        """


def kill_all(started: Sequence[StartedAgent]) -> None:
    """Kill all of them in parallel, since each may take seconds."""
    threads = [threading.Thread(target=one.kill, name="kill agent", daemon=True) for one in started]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Engine(ABC):
    """Lists the hosts of a run and starts an agent on each of them.

    The constructor gets the user's `hosts` ("" if none were given) and those of OPTIONS that were given. It raises
    ValueError for values that it cannot read.
    """

    # The keyword arguments of the constructor, all strings, with their help texts. The command line offers them as
    # flags: `lp_pipe launch --engine=ssh --ssh-config=F`.
    OPTIONS: ClassVar[Mapping[str, str]] = {}

    # Whether all agents run on the launcher's own host. If so, the launcher listens on no network interface.
    is_local: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, hosts: str = "", **options: str) -> None: ...

    @abstractmethod
    def hosts(self) -> Sequence[HostOffer]:
        """Return the hosts of the run, in the order in which nodes are placed on them. Called once, before `start`.

        Raises:
            LaunchError: the engine cannot find out which hosts there are.
        """

    @abstractmethod
    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        """Start an agent on each host: `PYTHON, *invitation.arguments(name)` with the secret on its stdin.

        Must not wait for the agents: the launcher sees which ones join. Each host is in exactly one returned item.

        Raises:
            LaunchError: an agent cannot be started. The engine has killed those that it had started.
        """

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent | None:
        """Start the agent of one host again after it ended; None if this engine cannot (a person or the host can).

        Called repeatedly until the host has joined again.

        Raises:
            LaunchError: the agent cannot be started now.
        """
        return None

    def preview(self, invitation: Invitation) -> str | None:
        """Return what `start` would submit to another system, without the secret, for a dry run.

        Only for engines that start hosts with exactly what `hosts()` says. None: the hosts' hardware is known only once
        agents have joined.

        Raises:
            LaunchError: the text cannot be made.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most engines have nothing to free
        """Free what is left. Called after the run, when everything that was started has been killed."""
