"""The engine `manual`: a person, or an unknown tool, starts the agents; the engine prints the commands for that."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts


class ManualEngine(Engine):
    """Prints one command for each host to stderr, and waits for the agents.

    hosts: names of the user's choice, with limits as for ssh.

    The secret is in a file of mode 0600 in the run's folder until the run ends. The user copies it to the hosts over
    an encrypted connection (scp).
    """

    def __init__(self, hosts: str = "", **options: str) -> None:
        if not hosts:
            raise ValueError(
                "engine 'manual': hosts is empty: give the names of the hosts on which you will start agents"
            )
        self._hosts = read_hosts(hosts)
        self._file: Path | None = None

    def hosts(self) -> Sequence[HostOffer]:
        return self._hosts

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        self._file = invitation.run_folder.agents_secret
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.unlink(missing_ok=True)
            with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(invitation.secret)
        except OSError as error:
            raise LaunchError(f"engine 'manual': cannot write the agents' secret to {self._file}: {error}") from error
        commands = [shlex.join(["python", *invitation.arguments(offer.name, "FILE")]) for offer in self._hosts]
        text = f"Copy {self._file} to each host (scp), then run there, with FILE as its name there:\n  "
        sys.stderr.write(text + "\n  ".join(commands) + "\n")
        return []

    def close(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
