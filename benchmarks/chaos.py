"""Killed anywhere, resumed exactly: the char GPT pipeline under kill -9 and SIGSTOP at random moments.

    python -m benchmarks.chaos [--rounds 5] [--seed 0] [--modes process,multi_host] [--json FILE]

A round starts the demo's program (feeder, three stages, evaluator, trainer; a small model) with `lp_pipe launch`, and
strikes one to three times: at a random moment a random process of the run, the launcher and its template included, is
killed, or stopped for some seconds. When the run has ended with a failure, `lp_pipe launch --resume` goes on from its
newest checkpoint, perhaps in another mode, and may be struck, too. The parameters' sha256 at the end must be the
undisturbed run's in every round, and no process may be left; else the exit status is 1.

"lost" is the time that a round took longer than the undisturbed run, per strike that ended a run: mostly the start of
all processes (a second or more to import torch), and the steps since the last checkpoint.
"""

import argparse
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks.report import machine, show_table, spread, write_json
from lp_pipe.launch.proctree import marked, tree_of

_TARGET = pathlib.Path(__file__).parents[1] / "examples" / "char_gpt.py"
_FLAGS = shlex.split(
    "--stages=3 --steps=40 --eval_every=4 --microbatches=4 --batch_size=8 --context=32 --width=32 --layers=3 --heads=2 "
    "--sample_length=20"
)
_MARK = "LP_PIPE_CHAOS"  # in the environment of every process of a round
_PATIENCE_S = 300.0


class Strike(NamedTuple):
    signal: str
    victim: str
    after_s: float
    ended_run: bool


class Round(NamedTuple):
    seconds: float
    sha256: str
    strikes: list[Strike]
    left: int  # processes that were still there 15 s after the end


class Run:
    """One round's runs, in one folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._output = folder.with_suffix(".log")

    def start(self, mode: str) -> "subprocess.Popen[bytes]":
        has_begun = (self._folder / "run.json").exists()
        where = f"--resume={self._folder}" if has_begun else f"--run-dir={self._folder}"
        hosts = ["--hosts=2"] if mode == "multi_host" else []  # agents on this host, each with nodes of its own
        command = [
            sys.executable,
            "-m",
            "lp_pipe",
            "launch",
            str(_TARGET),
            f"--mode={mode}",
            *hosts,
            where,
            "--",
            *_FLAGS,
        ]
        environment = {**os.environ, _MARK: self._mark}
        with self._output.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def sha256(self) -> str:
        found = re.findall(r"parameters sha256 ([0-9a-f]{64})", self._output.read_text(errors="replace"))
        if not found:
            raise RuntimeError(f"no result; its last lines:\n{self.last_lines()}")
        return str(found[-1])

    def last_lines(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-30:])

    def left(self) -> list[int]:
        """Processes that are still there, after 15 s at most."""
        deadline = time.monotonic() + 15
        while (pids := marked(_MARK, self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return pids


def strike(process: "subprocess.Popen[bytes]", rng: random.Random, after_s: float) -> Strike:
    """Hit a process of the run at a moment; wait for the end of what was stopped, and of the run if it is ending."""
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        pass
    else:
        return Strike("none", "the run had ended", after_s, ended_run=process.returncode != 0)
    victim = rng.choice([process.pid, *tree_of(process.pid)])
    name = _name_of(victim) if victim != process.pid else "launcher"
    kind = rng.choice([signal.SIGKILL, signal.SIGSTOP])
    try:
        os.kill(victim, kind)
        if kind == signal.SIGSTOP:
            time.sleep(rng.uniform(0.5, 12))
            os.kill(victim, signal.SIGCONT)
    except ProcessLookupError:
        return Strike("none", f"{name} had ended", after_s, ended_run=False)
    return Strike(kind.name, name, after_s, ended_run=False)


def disturbed(folder: pathlib.Path, rng: random.Random, modes: list[str], usual_s: float) -> Round:
    run = Run(folder)
    start = time.monotonic()
    left_to_strike = rng.randint(1, 3)
    strikes: list[Strike] = []
    for _ in range(20):
        process = run.start(rng.choice(modes))
        try:
            while left_to_strike and process.poll() is None:
                strikes.append(strike(process, rng, rng.uniform(0, usual_s)))
                left_to_strike -= 1
            process.wait(_PATIENCE_S)
        finally:
            process.kill()
        if strikes and process.returncode != 0:
            strikes[-1] = strikes[-1]._replace(ended_run=True)
        if process.returncode == 0:
            break
    seconds = time.monotonic() - start
    return Round(seconds, run.sha256(), strikes, len(run.left()))


def undisturbed(folder: pathlib.Path) -> Round:
    run = Run(folder)
    start = time.monotonic()
    process = run.start("process")
    process.wait(_PATIENCE_S)
    if process.returncode != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{run.last_lines()}")
    return Round(time.monotonic() - start, run.sha256(), [], len(run.left()))


def _name_of(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"


def figures_of(reference: Round, rounds: list[Round]) -> dict[str, Any]:
    lost = [
        (done.seconds - reference.seconds) / ends
        for done in rounds
        if (ends := sum(strike.ended_run for strike in done.strikes))
    ]
    return {
        "rounds": len(rounds),
        "same_sha256": sum(done.sha256 == reference.sha256 for done in rounds),
        "strikes": sum(strike.signal != "none" for done in rounds for strike in done.strikes),
        "runs_ended": sum(strike.ended_run for done in rounds for strike in done.strikes),
        "processes_left": sum(done.left for done in rounds),
        "undisturbed_s": reference.seconds,
        "lost_s": {**spread(lost), "p99": sorted(lost)[min(len(lost) - 1, int(0.99 * len(lost)))]} if lost else None,
        "strikes_of_rounds": [[strike._asdict() for strike in done.strikes] for done in rounds],
    }


def show(figures: dict[str, Any]) -> None:
    lost = figures["lost_s"]
    rows = [
        ["rounds", str(figures["rounds"])],
        ["with the undisturbed run's sha256", str(figures["same_sha256"])],
        ["strikes / runs that they ended", f"{figures['strikes']} / {figures['runs_ended']}"],
        ["processes left", str(figures["processes_left"])],
        ["undisturbed run, s", f"{figures['undisturbed_s']:.1f}"],
        ["lost per ended run, s: median / p99", f"{lost['median']:.1f} / {lost['p99']:.1f}" if lost else "none ended"],
    ]
    show_table("killed anywhere, resumed exactly", ["", "value"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="decides moments, victims and signals")
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["process"],
        help="of which each start takes one by chance, with commas: thread, process, multi_host (default: process)",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="lp-chaos-") as folder:
        reference = undisturbed(pathlib.Path(folder, "undisturbed"))
        for index in range(options.rounds):
            rng = random.Random(f"{options.seed}/{index}")
            done = disturbed(pathlib.Path(folder, f"round{index}"), rng, options.modes, reference.seconds)
            rounds.append(done)
            is_same = "same" if done.sha256 == reference.sha256 else "ANOTHER"
            struck = ", ".join(f"{strike.signal} {strike.victim}" for strike in done.strikes)
            sys.stderr.write(f"round {index}: {done.seconds:.1f} s, {is_same} sha256, {done.left} left; {struck}\n")
    figures = figures_of(reference, rounds)
    show(figures)
    write_json({"benchmark": "chaos", "machine": machine(), "seed": options.seed, **figures}, options.json)
    return 0 if figures["same_sha256"] == len(rounds) and not figures["processes_left"] else 1


if __name__ == "__main__":
    sys.exit(main())
