"""An agent in an actor of a Ray cluster: the actor, which starts it, and the launcher's view of it."""

import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lp_pipe.launch.engines.base import StartedAgent
from lp_pipe.telemetry.names import signal_name

_KEPT_LINES = 20
_PATIENCE_S = 2.0


class RayAgent(StartedAgent):
    """An agent that an actor has started. `output` yields the agent's output lines and last its exit status."""

    def __init__(self, ray: Any, host: str, actor: Any, output: Any, log_path: Path) -> None:
        super().__init__([host])
        self._ray = ray
        self._actor = actor
        self._ended: str | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log_path = log_path
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._reader = threading.Thread(target=self._read, args=(output,), name=f"output of agent {host}", daemon=True)
        self._reader.start()

    def how_it_ended(self) -> str | None:
        return self._ended

    def last_lines(self) -> list[str]:
        return list(self._lines)

    def kill(self) -> None:
        with suppress(Exception):  # the cluster or the actor is gone
            self._ray.kill(self._actor)
        self._reader.join(_PATIENCE_S)

    def _read(self, output: Any) -> None:
        try:
            with self._log_path.open("a", encoding="utf-8") as log:
                for item in output:
                    said = self._ray.get(item)
                    if isinstance(said, int):
                        self._ended = f"killed by {signal_name(-said)}" if said < 0 else f"exit status {said}"
                        return
                    self._lines.append(said)
                    print(said, file=log, flush=True)
            self._ended = "its Ray actor ended without reporting an exit status"
        except Exception as error:
            # When a host dies, Ray raises ActorDiedError or ActorUnavailableError, by chance, and retries neither.
            self._ended = f"{type(error).__name__}: {first_words(error)}"


def first_words(error: BaseException) -> str:
    """Return the first line of a long Ray error, and the line with the reason of an actor's death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines[1:] if "because" in line or "Error:" in line]
    return " ".join([*lines[:1], *reasons[-1:]]) or type(error).__name__


_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 4096
_libc = ctypes.CDLL(None)  # loaded here, because little may be done between fork and exec


class AgentActor:
    """The actor. Ray runs its methods one after the other, in the main thread of a process on the host."""

    def hostname(self) -> str:
        return socket.gethostname()

    def run(self, arguments: Sequence[str], secret: bytes, share: int, cores: int) -> Iterator[str | int]:
        """Run an agent, which dies with this process. Yield its output lines, then its exit status.

        share: the agent's number among those of this host, from 0. cores: how many cores each of them gets.
        """
        self._take_cores(share, cores)
        command = [sys.executable, *arguments]
        agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(_die_with, os.getpid()),
        )
        assert agent.stdin is not None and agent.stdout is not None
        with agent, agent.stdout as output:
            try:
                agent.stdin.write(secret + b"\n")
                agent.stdin.close()
            except OSError:  # it has ended; its status follows
                pass
            while line := output.readline(_LINE_BYTES):
                yield line.decode(errors="replace").rstrip()
        yield agent.returncode

    def _take_cores(self, share: int, cores: int) -> None:
        """Pin this process to its share of the cores: Ray only counts them, so agents of one host would overlap."""
        if hasattr(os, "sched_setaffinity"):
            mine = sorted(os.sched_getaffinity(0))[share * cores : (share + 1) * cores]
            if len(mine) == cores:  # otherwise Ray was told of more cores than the host has
                os.sched_setaffinity(0, mine)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the line above, so its signal will never come
            os._exit(1)
