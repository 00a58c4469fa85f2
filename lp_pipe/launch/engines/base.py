"""What an engine is: it says which hosts there are, and starts one agent on each. Nothing else.

    launcher ── Engine.start(invitation) ──► python -m lp_pipe agent --join ADDRESS --name HOST   (on every host)
        ▲                                         │
        └───────────── one mTLS connection ◄──────┘   placement, starts, exits, logs, stop: never the engine's business

A new engine is one file with one subclass of `Engine`. An installed package adds it by an entry point:

    [project.entry-points."lp_pipe.engines"]
    mine = "my_package.engine:MyEngine"
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class HostOffer:
    """A host, by the name that `Resources(host=...)` and messages call it, and at most what may be used of it.

    None: whatever the agent finds there. memory: bytes. labels: beside those that the agent finds there.
    """

    name: str
    cpus: int | None = None
    gpus: int | None = None
    memory: int | None = None
    labels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Invitation:
    """How an agent joins the run.

    addresses: where the launcher may be reached, "HOST:PORT" each; the agent tries one after the other.
    secret: whoever has it may run code in the run. It goes to the agent's stdin (one line; nothing may follow), or
        into a file of mode 0600 that the agent is told of by `--token-file`: never into arguments, the environment,
        or what others can read.
    log_dir: where `AgentProcess` writes what the agents print.
    interface: the network interface (or address) by which the hosts reach each other; "": that of the launcher.
    """

    addresses: Sequence[str]
    secret: bytes = field(repr=False)
    log_dir: str
    interface: str = ""

    def arguments(self, host: str, token_file: str = "-") -> list[str]:
        """What follows the interpreter on the command line of the agent of `host`; "-": `secret` is for its stdin."""
        interface = ["--interface", self.interface] if self.interface else []
        join = ["--join", ",".join(self.addresses), "--name", host, *interface, "--token-file", token_file]
        return ["-m", "lp_pipe", "agent", *join]


class StartedAgent(ABC):
    """Something that an engine has started: usually one agent, or one command that stands for several.

    hosts: the names of those whose agents end when this does.
    """

    # How long after an agent's last word `how_it_ended` may come to know of it: the error waits for so long.
    LAST_NEWS_S: ClassVar[float] = 0.5

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)

    @abstractmethod
    def how_it_ended(self) -> str | None:
        """In words ("exit status 255"); None while it runs. Returns at once."""

    @abstractmethod
    def last_lines(self) -> list[str]:
        """What it printed last: for the error when an agent does not join. Returns at once."""

    @abstractmethod
    def kill(self) -> None:
        """End it now, as far as the engine can. Idempotent; returns when it is gone, or after some seconds.

        An agent also ends by itself when its connection does, and takes its nodes with it.
        """


def kill_all(started: Sequence[StartedAgent]) -> None:
    """All at a time: each may take seconds."""
    threads = [threading.Thread(target=one.kill, name="kill agent", daemon=True) for one in started]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Engine(ABC):
    """Knows hosts, and starts an agent on each of them.

    Constructed with what the user gave as `hosts` ("" when nothing was), and with those of OPTIONS that were given.
    Raises ValueError in its constructor for what it cannot read.
    """

    # Keyword arguments of the constructor, all strings, with their help: `lp_pipe launch --engine=ssh --ssh-config=F`.
    OPTIONS: ClassVar[Mapping[str, str]] = {}

    # Whether all agents run on the launcher's own host: then nothing listens on the network.
    is_local: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, hosts: str = "", **options: str) -> None: ...

    @abstractmethod
    def hosts(self) -> Sequence[HostOffer]:
        """The hosts of the run, in the order in which they are filled; called once, before `start`.

        Raises:
            LaunchError: they cannot be found out.
        """

    @abstractmethod
    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        """Start an agent on each host: `PYTHON, *invitation.arguments(name)` with the secret on its stdin.

        Returns at once: who joins is seen by the launcher. Each host is in exactly one of what is returned.

        Raises:
            LaunchError: one cannot be started; those that were are killed.
        """

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent | None:
        """Start the agent of one host again, which had ended; None: only the host itself can.

        Called again and again, as long as the host has not come back.

        Raises:
            LaunchError: it cannot be started now.
        """
        return None

    def preview(self, invitation: Invitation) -> str | None:
        """What `start` would hand to somebody else, without the secret, where its hosts are as they are offered.

        None: what the hosts have is known only when agents have joined.

        Raises:
            LaunchError: it cannot be written.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing left
        """The run is over, everything that was started is killed: free what is left."""
