"""The command as a process: run to its end, or started and watched."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

COMMAND = [sys.executable, "-m", "lp_pipe"]
SERVER = [sys.executable, str(Path(__file__).with_name("command_server.py"))]
# Nodes end by themselves or are made to: no command of these tests needs longer.
PATIENCE_S = 60

Command = Callable[..., subprocess.CompletedProcess[str]]


class Started:
    """A command that is running; `output` is what was read of its stdout."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.output = ""

    def wait_for(self, text: str) -> str:
        """The first line of stdout that holds `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in:\n{self.output}\n{self.process.communicate()[1]}")

    def pids(self, count: int) -> dict[str, int]:
        """The processes of nodes that print `[label/index] pid N`."""
        lines = [self.wait_for("] pid ") for _ in range(count)]
        return {line.partition("]")[0][1:]: int(line.split()[-1]) for line in lines}

    def finish(self) -> tuple[int, list[str], list[str]]:
        """Exit status, the rest of stdout, stderr; as lines."""
        rest, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, rest.splitlines(), errors.splitlines()


Start = Callable[..., Started]


def is_alive(pid: int) -> bool:
    """Return whether the process is there; a zombie is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
