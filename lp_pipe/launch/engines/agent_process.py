"""A process of this host that is an agent, or that starts one elsewhere (ssh, srun)."""

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent, kill_all
from lp_pipe.telemetry.names import signal_name

_KEPT_LINES = 20
_KEPT_LINE_BYTES = 4096
_PATIENCE_S = 1.0


class AgentProcess(StartedAgent):
    """A running `command` in a session of its own, which gets the secret by stdin. Its output goes to a file.

    hosts: the hosts that lose their agents when it ends. env: for the command; None for this process's own.

    Raises (constructor):
        LaunchError: the command cannot be started.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        command: Sequence[str],
        invitation: Invitation,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(hosts)
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log_path = invitation.log_path(hosts[0])
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # only the launcher handles Ctrl+C
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]!r} for the agent of host {hosts[0]}: {error}") from error
        name = f"agent {hosts[0]}"
        self._reader = threading.Thread(target=self._read, name=f"output of {name}", daemon=True)
        self._reader.start()
        # In a thread: a command that does not read its stdin (password prompt, hung host) must not block us.
        secret = invitation.secret.rstrip(b"\n") + b"\n"
        threading.Thread(target=self._tell, args=(secret,), name=f"secret for {name}", daemon=True).start()

    def how_it_ended(self) -> str | None:
        status = self._process.poll()
        if status is None:
            return None
        self._reader.join(_PATIENCE_S / 4)  # the last lines say why
        return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"

    def last_lines(self) -> list[str]:
        return list(self._lines)

    def kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._reader.join(_PATIENCE_S)

    def _tell(self, secret: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which `how_it_ended` reports
            self._process.stdin.write(secret)
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe, self._log_path.open("ab", buffering=0) as log:
            while line := pipe.readline(_KEPT_LINE_BYTES):
                self._lines.append(line.decode(errors="replace").rstrip())
                with contextlib.suppress(OSError):  # disk full: `last_lines` still works
                    log.write(line)


def start_each(engine: Engine, hosts: Sequence[HostOffer], invitation: Invitation) -> list[StartedAgent]:
    """Start the agent of each host with `engine.start_again`; if one cannot be started, kill the others."""
    started: list[StartedAgent] = []
    try:
        for offer in hosts:
            one = engine.start_again(invitation, offer.name)
            assert one is not None, "start_each is for engines that can start a single agent"
            started.append(one)
    except BaseException:
        kill_all(started)
        raise
    return started
