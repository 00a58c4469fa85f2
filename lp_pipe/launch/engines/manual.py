"""Agents that a person, or some tool that we do not know, starts on each host: this engine says how, and waits."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts


class ManualEngine(Engine):
    """hosts: their names, with limits, as for ssh; free to choose.

    Prints one command for each to stderr, and writes the secret into a file of mode 0600 in the run's folder, which
    is to be copied to the hosts in a way that nobody can read along (scp). It goes at the end of the run.
    """

    def __init__(self, hosts: str = "", **options: str) -> None:
        if not hosts:
            raise ValueError("engine 'manual' needs hosts: the names of those that you will start agents on")
        self._hosts = read_hosts(hosts)
        self._file: Path | None = None

    def hosts(self) -> Sequence[HostOffer]:
        return self._hosts

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        self._file = Path(invitation.log_dir).parent / "agents.secret"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.unlink(missing_ok=True)
            with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(invitation.secret)
        except OSError as error:
            raise LaunchError(f"the agents' secret cannot be written: {error}") from error
        commands = [shlex.join(["python", *invitation.arguments(offer.name, "FILE")]) for offer in self._hosts]
        text = f"Copy {self._file} to each host (scp), then run there, with FILE as its name there:\n  "
        sys.stderr.write(text + "\n  ".join(commands) + "\n")
        return []

    def close(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
