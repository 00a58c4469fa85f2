"""A script written for torchrun as a program: each rank is a node of the group "rank", which runs it as `__main__`.

Rank r is node rank/r. As with torchrun, the ranks of a host have consecutive numbers. The first failure of a rank is
the program's failure and ends the other ranks.
"""

import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lp_pipe as lp

LABEL = "rank"
_MAIN = "__main__"


@dataclass(frozen=True)
class Script:
    """A script or module with its arguments, which every rank runs.

    path: a file, relative to the current folder if it is below it; None for a module. source: the file's contents.
    """

    argv: tuple[str, ...]
    path: str | None = None
    source: bytes = b""
    module: str = ""

    @classmethod
    def of_file(cls, path: Path, argv: Sequence[str]) -> "Script":
        """Read a script and check its syntax.

        Raises:
            OSError, SyntaxError, ValueError: the file cannot be read, or is no valid Python.
        """
        source = path.read_bytes()
        compile(source, str(path), "exec", dont_inherit=True)
        absolute = path.resolve()
        below = absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
        return cls(tuple(argv), str(below), source)

    def run(self) -> None:
        """Run it in this process as `python FILE` does, or `python -m MODULE`."""
        if self.path is None:
            sys.argv[:] = [self.module, *self.argv]
            runpy.run_module(self.module, run_name=_MAIN, alter_sys=True)
            return
        file = str(Path.cwd() / self.path)
        sys.argv[:] = [file, *self.argv]
        sys.path.insert(0, os.path.dirname(file))
        main = types.ModuleType(_MAIN)
        main.__file__ = file
        sys.modules[_MAIN] = main  # stays there, because exit functions may need it
        exec(compile(self.source, file, "exec", dont_inherit=True), main.__dict__)


@dataclass(frozen=True)
class Rank:
    """The number of a rank, and the numbers of ranks and hosts."""

    rank: int
    num_per_host: int
    num_hosts: int

    def environment(self, master: str, run_id: str) -> dict[str, str]:
        """Return the environment variables that torchrun sets. master: "host:port", where rank 0 will listen."""
        host, _, port = master.rpartition(":")
        world_size = str(self.num_per_host * self.num_hosts)
        group, local = divmod(self.rank, self.num_per_host)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.num_per_host),
            "GROUP_RANK": str(group),
            "GROUP_WORLD_SIZE": str(self.num_hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": host.strip("[]"),
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 keeps the store
        }


def make_program(script: Script, num_per_host: int, num_hosts: int = 1) -> lp.Program:
    """Return a program of num_per_host * num_hosts ranks; it needs a mode with processes.

    Each rank has OMP_NUM_THREADS threads, or 1 if that is not set. It sees all GPUs of its host and uses the one with
    the number LOCAL_RANK, as under torchrun.
    """
    program = lp.Program(Path(script.path).stem if script.path else script.module.rpartition(".")[2])
    master = lp.Address("master")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    resources = lp.Resources(threads=int(threads) if threads.isdecimal() and int(threads) else 1)
    with program.group(LABEL, resources=resources):
        for number in range(num_per_host * num_hosts):
            node = lp.PyNode(run_script, script, Rank(number, num_per_host, num_hosts), master)
            if number == 0:
                master.assign(node)
            program.add_node(node)
    return program


def run_script(script: Script, rank: Rank, master: lp.Address) -> None:
    os.environ.update(rank.environment(master.resolve(), lp.context().run_dir.name))
    # Scripts do not know lp_pipe's stop. torchrun also ends them by SIGTERM, for which they may have a handler.
    lp.register_stop_handler(lambda: os.kill(os.getpid(), signal.SIGTERM))
    script.run()
