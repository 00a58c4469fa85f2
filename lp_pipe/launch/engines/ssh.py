"""The engine `ssh`: agents on hosts that `ssh HOST` reaches without a prompt."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from lp_pipe.launch.engines.agent_process import AgentProcess, start_each
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts

# BatchMode: no prompts, which would wait for ever. ServerAlive: a silently broken connection ends instead of hanging.
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5"]


class SshEngine(Engine):
    """Starts each agent with `ssh HOST`.

    hosts: `h1,h2:gpus=4`, or a file with one host per line; names as ssh takes them (aliases, user@host).
    ssh_config: a configuration file for ssh, in place of the user's.
    python: the interpreter on the hosts; default: the path of the launcher's own. Python, lp_pipe and torch must have
        the launcher's versions there.

    The secret goes through ssh to the agent's stdin. The shell's start files on the hosts must print nothing, as for
    scp.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "ssh_config": "configuration file for ssh, in place of the user's",
        "python": "interpreter on the hosts (default: this one's path)",
    }

    def __init__(self, hosts: str = "", *, ssh_config: str = "", python: str = "") -> None:
        if not hosts:
            raise ValueError(
                "engine 'ssh': hosts is empty: give hosts='h1,h2:gpus=4', or the name of a file with one host per line"
            )
        if ssh_config and not Path(ssh_config).is_file():
            raise ValueError(f"engine 'ssh': ssh_config={ssh_config!r}: this file does not exist")
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
