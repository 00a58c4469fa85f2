"""Agents on hosts that `ssh HOST` reaches without being asked for anything."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from lp_pipe.launch.engines.agent_process import AgentProcess, start_each
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts

# Never a question that nobody can answer; a connection that breaks in silence ends, instead of hanging for hours.
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5"]


class SshEngine(Engine):
    """hosts: `h1,h2:gpus=4` or a file with one a line; names as ssh takes them (aliases of its configuration, user@h).

    ssh_config: a configuration file for ssh, in place of the user's. python: the interpreter on the hosts, which must
    be of the launcher's version and have lp_pipe (and torch) installed in the launcher's versions; default: the path
    of the launcher's own.

    The secret goes through ssh to the agent's stdin. A shell's start files on the host must print nothing, as for scp.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "ssh_config": "configuration file for ssh, in place of the user's",
        "python": "interpreter on the hosts (default: this one's path)",
    }

    def __init__(self, hosts: str = "", *, ssh_config: str = "", python: str = "") -> None:
        if not hosts:
            raise ValueError("engine 'ssh' needs hosts: such as hosts='h1,h2:gpus=4', or a file with one a line")
        if ssh_config and not Path(ssh_config).is_file():
            raise ValueError(f"ssh_config={ssh_config!r}: there is no such file")
        self._hosts = read_hosts(hosts)
        self._python = python or sys.executable
        self._ssh = [*_SSH, "-F", ssh_config] if ssh_config else _SSH

    def hosts(self) -> Sequence[HostOffer]:
        return self._hosts

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        return start_each(self, self._hosts, invitation)

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent:
        remote = shlex.join([self._python, *invitation.arguments(name)])
        return AgentProcess([name], [*self._ssh, "--", name, f"exec {remote}"], invitation)
