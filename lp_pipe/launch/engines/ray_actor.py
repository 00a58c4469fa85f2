"""What runs inside of Ray for one host: an actor that starts the agent there, and passes on what it prints."""

import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 4096
_libc = ctypes.CDLL(None)  # here, because little may be done between fork and exec


class AgentActor:
    """Ray runs its methods one after the other, in the main thread of a process of the host."""

    def hostname(self) -> str:
        return socket.gethostname()

    def run(self, arguments: Sequence[str], secret: bytes, share: int, cores: int) -> Iterator[str | int]:
        """Run an agent; what it prints, by lines, then its exit status. It dies with this process.

        share, cores: it is the so-manyth agent of this host, from 0 on; each has as many cores of its own.
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
            except OSError:  # it has ended: its status is seen
                pass
            while line := output.readline(_LINE_BYTES):
                yield line.decode(errors="replace").rstrip()
        yield agent.returncode

    def _take_cores(self, share: int, cores: int) -> None:
        """Ray only counts cores. Without this, agents of one host would hand out the same ones."""
        if hasattr(os, "sched_setaffinity"):
            mine = sorted(os.sched_getaffinity(0))[share * cores : (share + 1) * cores]
            if len(mine) == cores:  # else Ray was told of more than there are
                os.sched_setaffinity(0, mine)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above: that signal will never come
            os._exit(1)
