"""Whatever part of a distributed experiment is killed, and whenever, it ends with the result of one process."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from lp_pipe.testing import faults
from tests.rl.bandit import Bandit, config
from tests.seeds import random_numbers
from tests.waiting import until

pytestmark = pytest.mark.slow

MAX_STEPS, ACTORS = 1003, 4
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import lp_pipe as lp
import lp_pipe.rl as rl
from lp_pipe.launch.processes import template
from tests.rl.bandit import Bandit
from tests.rl.test_kills import experiment

folder = Path(sys.argv[1])
steps = str(folder / "steps")

class Slow(Bandit):
    def __init__(self, is_counted):
        super().__init__()
        self.is_counted = is_counted

    def step(self, action):
        time.sleep(0.005)
        if self.is_counted:
            with open(steps, "a") as file:
                file.write("x")
        return super().step(action)

template._WORTH_PRELOADING = ()
program = rl.make_distributed_experiment(experiment(lambda seed: Slow(seed % 2 == 0)), num_actors=4)
run = lp.launch(program, mode="process", run_dir=folder / "run")
while True:
    state = {f"{label}/{index}": row["pid"] for label, rows in run.status().items() for index, row in enumerate(rows)}
    (folder / "pids.new").write_text(json.dumps(state))
    (folder / "pids.new").rename(folder / "pids")
    try:
        run.wait(0.02)
        break
    except TimeoutError:
        pass
"""


def experiment(make: Any) -> rl.ExperimentConfig:
    evaluation = rl.Evaluation(every=200, episodes=3)
    settings: dict[str, Any] = {"evaluation": evaluation, "checkpoint_every": 20, "order": rl.Rounds(8, lag=1)}
    return config(None, max_num_actor_steps=MAX_STEPS, environment_factory=make, envs_per_actor=3, **settings)


def pid_of(victim: str, folder: Path, launcher: int) -> int | None:
    if victim == "launcher":
        return launcher
    pids = {}
    with suppress(FileNotFoundError):
        pids = json.loads((folder / "pids").read_text())
    if victim == "template":
        for child in psutil.Process(launcher).children():
            if any(grandchild.pid in pids.values() for grandchild in child.children()):
                return child.pid
        return None
    return pids.get(victim) or None


def num_steps(folder: Path) -> int:
    path = folder / "steps"
    return path.stat().st_size if path.exists() else 0


class Struck:
    """A run of the experiment in a process of its own, which is started again after its launcher has died."""

    def __init__(self, folder: Path) -> None:
        (folder / "script.py").write_text(SCRIPT)
        self.folder = folder
        self.known: set[int] = set()
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, str(self.folder / "script.py"), str(self.folder)]
        self.launcher = subprocess.Popen(command, env=environment)

    def has_come_to(self, moment: int) -> bool:
        return num_steps(self.folder) >= moment or self.launcher.poll() is not None

    def kill(self, victim: str) -> None:
        pid = pid_of(victim, self.folder, self.launcher.pid) if self.launcher.poll() is None else None
        if pid is None:
            return
        self.known |= set(json.loads((self.folder / "pids").read_text()).values()) - {0}
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if victim in ("launcher", "template"):
            assert self.launcher.wait(60) != 0
            self.check_nothing_is_left()
            self.start()

    def check_nothing_is_left(self) -> None:
        until(lambda: not any(psutil.pid_exists(pid) for pid in self.known), within_s=20)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("victim", ["actor", "learner", "replay", "counter", "evaluator", "launcher", "template"])
def test_the_result_does_not_depend_on_kills(victim: str, seed: int, tmp_path: Path) -> None:
    order = random_numbers(seed)
    struck = Struck(tmp_path)
    try:
        for moment in sorted(order.randrange(50, MAX_STEPS - 50) for _ in range(3)):
            until(lambda moment=moment: struck.has_come_to(moment), within_s=60)  # type: ignore[misc]
            index = order.randrange(ACTORS) if victim == "actor" else 0
            struck.kill(victim if victim in ("launcher", "template") else f"{victim}/{index}")
        assert struck.launcher.wait(90) == 0
        struck.check_nothing_is_left()
    finally:
        struck.launcher.kill()
    found, expected = rl.load(tmp_path / "run"), rl.run_experiment(experiment(lambda seed: Bandit()), ACTORS)
    assert found.counts["env_steps"] == found.counts["inserts"] == MAX_STEPS
    assert (found.counts, found.curve, found.fingerprint) == (expected.counts, expected.curve, expected.fingerprint)
    if victim in ("actor", "evaluator"):
        assert "resumed" not in (tmp_path / "run" / "metrics.jsonl").read_text()  # nothing has gone back


class Paced(Bandit):
    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


def make_paced(seed: int) -> Bandit:
    return Paced()


@pytest.mark.parametrize("victim", ["actor", "learner", "replay", "counter", "evaluator"])
def test_free_order_ends_well_with_its_steps_and_ratio(victim: str, no_leaks: None, tmp_path: Path) -> None:
    order = random_numbers(0)
    one = dataclasses.replace(experiment(make_paced), order=rl.Free())
    shown: dict[str, int] = {}
    with lp.launch(rl.make_distributed_experiment(one, ACTORS), mode="process", run_dir=tmp_path) as run:
        counter = run.client("counter")

        def has_come_to(moment: int) -> bool:
            with suppress(lp.Unavailable):
                counts = counter.get()
                assert all(counts.get(name, 0) >= count for name, count in shown.items())
                shown.update(counts)
            return shown.get("env_steps", 0) >= moment

        for moment in sorted(order.randrange(50, MAX_STEPS - 200) for _ in range(3)):
            until(lambda moment=moment: has_come_to(moment), within_s=60)  # type: ignore[misc]
            with suppress(ProcessLookupError):
                faults.kill(run, (victim, order.randrange(ACTORS) if victim == "actor" else 0))
        until(lambda: has_come_to(MAX_STEPS - 100), within_s=60)
        run.wait(90)
    counts = rl.load(tmp_path).counts
    assert counts["env_steps"] == counts["inserts"] == MAX_STEPS
    assert abs(counts["samples"] - 1.5 * (MAX_STEPS - 10)) <= 0.02 * counts["samples"]
    assert counts["samples"] == 4 * counts["learner_steps"]
