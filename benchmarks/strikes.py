"""Strike a run at its worst moments, and resume it until it is done (for benchmarks.chaos).

Moments: "any" one; "write", while a checkpoint is being written; "restart", while a run that was ended starts again, or
while a killed process is being restarted in its place.
"""

import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lp_pipe.process_tree import marked, tree_of

REPOSITORY = pathlib.Path(__file__).parents[1]
MOMENTS = ("any", "write", "restart")
_MARK = "LP_PIPE_CHAOS"  # in the environment of every process of a round
_PATIENCE_S = 300.0
_LOOK_AGAIN_S = 0.0005
_MAX_STARTS = 20
_LATEST = 0.8  # of the undisturbed run: later, a faster one would be over


class Program(NamedTuple):
    """A target of `lp_pipe launch` that prints the sha256 of its parameters, and can be resumed."""

    target: str
    flags: tuple[str, ...]


class Strike(NamedTuple):
    """ended_run: the run did not get over it by itself, and was resumed."""

    signal: str
    victim: str
    moment: str
    ended_run: bool


class Round(NamedTuple):
    seconds: float
    sha256: str
    strikes: list[Strike]
    left: int  # processes that were still there 15 s after the end


class Chance(NamedTuple):
    """The options of a round. usual_s: the time of an undisturbed run; longest_stop_s: the longest SIGSTOP."""

    rng: random.Random
    modes: Sequence[str]
    usual_s: float
    longest_stop_s: float = 12.0  # a launcher that is silent for 8 s is taken for dead
    most_strikes: int = 3


class Run:
    """The runs of a round, in one folder."""

    def __init__(self, program: Program, folder: pathlib.Path) -> None:
        self._program = program
        self._folder = folder
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._output = folder.with_suffix(".log")

    @property
    def has_begun(self) -> bool:
        return (self._folder / "run.json").exists()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written now."""
        try:
            return any(name.startswith(".step-") for name in os.listdir(self._folder / "checkpoints"))
        except OSError:
            return False  # nothing has been written yet

    def start(self, mode: str) -> "subprocess.Popen[bytes]":
        where = f"--resume={self._folder}" if self.has_begun else f"--run-dir={self._folder}"
        hosts = ["--hosts=2"] if mode == "multi_host" else []  # agents on this host, each with nodes of its own
        launch = [sys.executable, "-m", "lp_pipe", "launch", self._program.target, f"--mode={mode}", *hosts, where]
        environment = {**os.environ, _MARK: self._mark}
        with self._output.open("ab") as output:
            command = [*launch, "--", *self._program.flags]
            return subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=REPOSITORY)

    def sha256(self) -> str:
        found = re.findall(r"parameters sha256 ([0-9a-f]{64})", self._output.read_text(errors="replace"))
        if not found:
            raise RuntimeError(f"no result; its last lines:\n{self.last_lines()}")
        return str(found[-1])

    def last_lines(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-30:])

    def what_it_does(self) -> str:
        """The stacks of its processes, its reports of hangs, and what it printed last."""
        command = [sys.executable, "-m", "lp_pipe", "stacks", str(self._folder)]
        told = "its stacks cannot be had"
        with contextlib.suppress(subprocess.TimeoutExpired):
            stacks = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            told = stacks.stdout + stacks.stderr
        reports = self._folder / "hangs.log"
        hangs = reports.read_text(errors="replace")[-20_000:] if reports.exists() else "no reports of hangs"
        return f"{told}\n{hangs}\n{self.last_lines()}"

    def left(self) -> list[int]:
        """Processes that are still there, after 15 s at most."""
        deadline = time.monotonic() + 15
        while (pids := marked(_MARK, self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return pids


def undisturbed(program: Program, folder: pathlib.Path) -> Round:
    run = Run(program, folder)
    start = time.monotonic()
    process = run.start("process")
    process.wait(_PATIENCE_S)
    if process.returncode != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{run.last_lines()}")
    return Round(time.monotonic() - start, run.sha256(), [], len(run.left()))


def disturbed(program: Program, folder: pathlib.Path, chance: Chance) -> Round:
    """Strike, and resume, until the program is done; after the last strike it is left alone."""
    run, rng = Run(program, folder), chance.rng
    start = time.monotonic()
    moments = rng.choices(MOMENTS, k=rng.randint(1, chance.most_strikes))
    strikes: list[Strike] = []
    for _ in range(_MAX_STARTS):
        is_resumed = run.has_begun
        process = run.start(rng.choice(chance.modes))
        before = len(strikes)
        try:
            while moments and process.poll() is None:
                strikes += _strikes(run, process, chance, moments.pop(), is_resumed)
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            struck = ", ".join(f"{strike.signal} {strike.victim} ({strike.moment})" for strike in strikes)
            raise RuntimeError(f"the run hangs, after {struck or 'no strike'}:\n{run.what_it_does()}") from None
        finally:
            process.kill()
            process.wait()
        if process.returncode == 0:
            break
        if len(strikes) > before:
            strikes[-1] = strikes[-1]._replace(ended_run=True)
    seconds = time.monotonic() - start
    return Round(seconds, run.sha256(), strikes, len(run.left()))


def _strikes(
    run: Run, process: "subprocess.Popen[bytes]", chance: Chance, moment: str, is_resumed: bool
) -> list[Strike]:
    """Make one strike, or two if the first causes the restart that the second one hits."""
    rng = chance.rng
    if moment == "write":
        is_hit = _wait_until(
            lambda: run.is_writing, process, rng.uniform(0, _LATEST * chance.usual_s), 2 * chance.usual_s
        )
        return _strike(process, chance, "write" if is_hit else "any")
    if moment == "restart" and is_resumed:
        _sleep(process, rng.uniform(0, chance.usual_s / 3))
        return _strike(process, chance, "restart")
    _sleep(process, rng.uniform(0, _LATEST * chance.usual_s))
    first = _strike(process, chance, "any")
    if moment == "any" or process.poll() is not None:
        return first
    _sleep(process, rng.uniform(0, 0.8))
    return first + _strike(process, chance, "restart")


def _strike(process: "subprocess.Popen[bytes]", chance: Chance, moment: str) -> list[Strike]:
    """Hit a process of the run, its launcher and template included; what is stopped goes on some time later."""
    if process.poll() is not None:
        return []
    rng = chance.rng
    # In order of names, which does not depend on who was forked first.
    named = sorted((_name_of(pid), pid) for pid in tree_of(process.pid))
    name, victim = rng.choice([("launcher", process.pid), *named])
    kind = rng.choice([signal.SIGKILL, signal.SIGSTOP])
    try:
        os.kill(victim, kind)
        if kind == signal.SIGSTOP:
            _sleep(process, rng.uniform(0.1, chance.longest_stop_s))
            os.kill(victim, signal.SIGCONT)
    except ProcessLookupError:
        return []  # it had just ended
    return [Strike(kind.name, name, moment, ended_run=False)]


def _wait_until(
    condition: Callable[[], bool], process: "subprocess.Popen[bytes]", after_s: float, within_s: float
) -> bool:
    _sleep(process, after_s)
    deadline = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(_LOOK_AGAIN_S)  # nobody tells of a write that begins
    return False


def _sleep(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Sleep, but not longer than the run lives."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.02))


def _name_of(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"
