"""Measure the cost of checkpoints and of a killed stage: the char GPT in processes.

    python -m benchmarks.checkpoints [--rounds 25] [--recoveries 7] [--quick] [--json FILE]

Overhead: one running pipeline trains blocks of 10 steps in turn: without a checkpoint, with an asynchronous one, with a
blocking one. It is saved at the block's beginning, and the block ends when it is on the disk: all that writing costs is
inside. Ratios are between the blocks of a round, which are neighbours in time; those of the CPU time of all nodes
hardly depend on what else the machine does, and say what is lost where every core is busy.

Recovery: a stage is killed in the middle between two checkpoints, and starts again in its place. From the kill to the
end of the step that was under way then, less the steps that were repeated, each as long as the median of this run; to
be compared with that stage's own start-up: from the fork of its process to its first answer, of this very restart (at
the launch, beside other processes that start, it takes longer).
"""

import argparse
import contextlib
import functools
import os
import pathlib
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, spread, write_json
from examples import char_gpt
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.pipeline.protocol import Ping

GOAL_OVERHEAD = 0.05
GOAL_RECOVERY = 2.0
EVERY = 10  # steps between two checkpoints
PARTIES = ("none", "async", "blocking")
_MANY = 1_000_000
_CONFIG = char_gpt.DEFAULT  # what `make demo` trains
_QUICK = char_gpt.Config(batch_size=8, context=16, width=16, layers=2, heads=2)


class Recovery(NamedTuple):
    """repeated: steps since the checkpoint, the one that was under way when the stage was killed included."""

    total_s: float
    repeated: int
    step_s: float

    @property
    def without_steps_s(self) -> float:
        return self.total_s - self.repeated * self.step_s


class Trainer:
    """Trains as it is told to, and times it."""

    def __init__(self, pipeline: pp.PipelineClient) -> None:
        self._pipeline = pipeline
        self._checkpoints = Checkpoints({"pipeline": pipeline}, keep=2)

    def block(self, party: str) -> float:
        """Seconds of the steps between two checkpoints, and of one."""
        start = time.monotonic()
        if party != "none":
            self._checkpoints.save(self._pipeline.current_step(), wait=party == "blocking")
        for _ in self._pipeline.steps(EVERY):
            pass
        self._checkpoints.wait_until_written()
        return time.monotonic() - start

    def pauses(self) -> tuple[float, float]:
        """Seconds that training stands still for an asynchronous checkpoint, and until it is written."""
        start = time.monotonic()
        self._checkpoints.save(self._pipeline.current_step(), wait=False)
        paused = time.monotonic()
        self._checkpoints.wait_until_written()
        return paused - start, time.monotonic() - start

    def recover_from(self, pid: int) -> Recovery:
        """Kill the stage after a few steps; the step that was under way then is the last one."""
        begin = self._pipeline.current_step()
        self._checkpoints.save(begin)
        killed_at, last_step = 0.0, 0
        times: list[float] = []
        before = time.monotonic()
        for result in self._checkpoints.steps(self._pipeline, _MANY, save_every=_MANY):
            now = time.monotonic()
            times.append(now - before)
            before = now
            if not killed_at and result.step == begin + EVERY // 2:
                last_step, killed_at = result.step + 1, now
                os.kill(pid, signal.SIGKILL)
            elif killed_at and result.step == last_step:
                return Recovery(now - killed_at, last_step - begin + 1, statistics.median(times))
        raise AssertionError("there are more steps")


class StartUp(threading.Thread):
    """Watches for the successor of a stage's process; `seconds`: from its fork to its first answer."""

    def __init__(self, run: lp.Run, pid: int) -> None:
        super().__init__(name="start-up")
        self._run, self._pid = run, pid
        self.seconds = 0.0

    def run(self) -> None:
        while (row := self._run.status()["stages"][-1])["state"] != "running" or row["pid"] == self._pid:
            time.sleep(0.005)  # a run tells nobody of its nodes' states
        self._run.client("stages", -1).do(Ping())
        self.seconds = _age_s(row["pid"])


@contextlib.contextmanager
def launched(config: char_gpt.Config, run_dir: str) -> Iterator[tuple[lp.Run, Any]]:
    """The run, and a client of its trainer."""
    model = pp.Model(
        [pp.Layer(factory, name=name) for name, factory in char_gpt.layer_factories(config)],
        loss=char_gpt.loss,
        optimizer=functools.partial(char_gpt.optimizer, learning_rate=config.learning_rate),
        seed=config.seed,
    )
    program = lp.Program("bench_checkpoints")
    feeder = lp.CourierNode(char_gpt.Feeder, config.batch_size, config.context, config.seed)
    pipeline = pp.add_pipeline(
        program,
        model,
        stages=config.stages,
        schedule=config.schedule,
        microbatches=config.microbatches,
        inputs=program.add_node(feeder, label="feeder"),
        on_failure="restart",
    )
    trainer = program.add_node(lp.CourierNode(Trainer, pipeline), label="trainer")
    with lp.launch(program, "process", run_dir=run_dir) as run:
        yield run, run.client(trainer)


def _age_s(pid: int) -> float:
    """Seconds since a process was forked; Linux only."""
    started = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def measured_overhead(config: char_gpt.Config, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {party: [] for party in PARTIES}
    cpu: dict[str, list[float]] = {party: [] for party in PARTIES}
    with tempfile.TemporaryDirectory(prefix="lp-bench-") as folder, launched(config, folder) as (run, trainer):
        for party in PARTIES:  # buffers, the page cache, the optimizer's state
            trainer.block(party)
        for index in range(rounds):
            for party in PARTIES[index % 3 :] + PARTIES[: index % 3]:
                before = _cpu_s(run)
                seconds[party].append(trainer.block(party))
                cpu[party].append(_cpu_s(run) - before)
        pauses, writes = zip(*[trainer.pauses() for _ in range(max(2, rounds))], strict=True)
        size = sum(file.stat().st_size for file in _newest_checkpoint(folder).rglob("*") if file.is_file())
    characters = EVERY * config.batch_size * config.context
    return {
        "characters_per_s": {party: spread(characters / s for s in seconds[party]) for party in PARTIES},
        "cost": {party: _cost(seconds, party) for party in PARTIES[1:]},
        "cpu_cost": {party: _cost(cpu, party) for party in PARTIES[1:]},
        "pause_ms": spread(1e3 * s for s in pauses),
        "written_after_ms": spread(1e3 * s for s in writes),
        "checkpoint_bytes": size,
    }


def _cost(taken: dict[str, list[float]], party: str) -> dict[str, Any]:
    return spread(one / without - 1 for one, without in zip(taken[party], taken["none"], strict=True))


def _cpu_s(run: lp.Run) -> float:
    """Return the CPU seconds of all nodes so far."""
    pids = [row["pid"] for rows in run.status().values() for row in rows]
    stats = [pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def _newest_checkpoint(run_dir: str) -> pathlib.Path:
    return max(pathlib.Path(run_dir, "checkpoints").glob("step-*"))


def measured_recovery(config: char_gpt.Config, recoveries: int) -> dict[str, Any]:
    """Each in a program of its own, so that each has the back-off of a first restart."""
    found: list[tuple[float, Recovery]] = []
    for _ in range(recoveries):
        folder = tempfile.mkdtemp(prefix="lp-bench-")
        try:
            with launched(config, folder) as (run, trainer):
                trainer.block("none")  # buffers
                pid = int(run.status()["stages"][-1]["pid"])
                start_up = StartUp(run, pid)
                start_up.start()
                recovery = trainer.recover_from(pid)
                start_up.join()
                found.append((start_up.seconds, recovery))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {
        "startup_s": spread(startup for startup, _ in found),
        "recovery_s": spread(recovery.total_s for _, recovery in found),
        "without_repeated_steps_s": spread(recovery.without_steps_s for _, recovery in found),
        "to_startup": spread(recovery.without_steps_s / startup for startup, recovery in found),
        "repeated_steps": [recovery.repeated for _, recovery in found],
        "step_ms": spread(1e3 * recovery.step_s for _, recovery in found),
    }


def show(overhead: dict[str, Any], recovery: dict[str, Any]) -> None:
    names = {"none": "no checkpoints", "async": f"every {EVERY} steps, asynchronous"}
    rows = []
    for party in PARTIES:
        costs = [_range(overhead[kind][party], ".1%") for kind in ("cost", "cpu_cost") if party != "none"]
        rate = _range(overhead["characters_per_s"][party], ",.0f")
        rows.append([names.get(party, f"every {EVERY} steps, {party}"), rate, *(costs or ["", ""])])
    title = f"checkpoints of the char GPT: median (min to max) of the rounds; goal: cost under {GOAL_OVERHEAD:.0%}"
    show_table(title, ["", "characters/s", "cost", "CPU cost"], rows)
    show_table(
        f"a killed stage; goal: under {GOAL_RECOVERY:g}x of its start-up, plus the repeated steps",
        ["", "median (min to max)"],
        [
            ["training stands still for a checkpoint, ms", _range(overhead["pause_ms"], ".1f")],
            ["it is on the disk after, ms", _range(overhead["written_after_ms"], ".1f")],
            ["the stage's start-up, s", _range(recovery["startup_s"], ".2f")],
            ["recovery, s", _range(recovery["recovery_s"], ".2f")],
            ["... without the repeated steps, s", _range(recovery["without_repeated_steps_s"], ".2f")],
            ["... in start-ups", _range(recovery["to_startup"], ".2f")],
        ],
    )


def _range(values: dict[str, Any], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--recoveries", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few steps: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    config = _QUICK if options.quick else _CONFIG
    rounds, recoveries = (2, 2) if options.quick else (options.rounds, options.recoveries)
    overhead = measured_overhead(config, rounds)
    recovery = measured_recovery(config, recoveries)
    show(overhead, recovery)
    settings = {"rounds": rounds, "every": EVERY, "goals": [GOAL_OVERHEAD, GOAL_RECOVERY]}
    figures = {"settings": settings, "overhead": overhead, "recovery": recovery}
    write_json({"benchmark": "checkpoints", "machine": machine(), **figures}, options.json)


if __name__ == "__main__":
    main()
