"""Whatever is killed of an experiment, and whenever, its rows are those of an undisturbed one."""

import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import lp_pipe.search as ls
from lp_pipe.checkpoint.folder import open_checkpoint
from lp_pipe.cli.main import main
from lp_pipe.process_tree import start_time
from lp_pipe.search.store import ExperimentFolder, Reading, Store
from tests.search.trial_script import trial_script
from tests.seeds import random_numbers
from tests.waiting import until

pytestmark = pytest.mark.slow

SCRIPT = trial_script("""
def make_program(name: str = "struck"):
    searcher = ls.Halving("loss", 16, 16, divisor=2)
    return ls.experiment(
        name, trial, space={"x": ls.uniform(0.0, 1.0), "seconds": 0.05}, searcher=searcher, slots=3
    )
""")
MOST_KILLS = 12


def committed(folder: Path) -> list[tuple[int, int, str, float]]:
    return sorted(row[:4] for row in ls.open(folder).rows())


def a_victim(folder: Path, order: random.Random, launcher: int) -> int | None:
    """Return a process of the experiment; None if the chosen one does not live."""
    kind = order.choice(["slot", "slot", "slot", "searcher", "launcher"])
    if kind == "launcher":
        return launcher
    if kind == "searcher":
        return ExperimentFolder(folder).owner()
    with suppress(FileNotFoundError):
        running = [one.id for one in ls.open(folder).trials() if one.state == "running"]
        if running:
            pid = int((folder / "trials" / str(order.choice(running)) / "pid").read_text())
            return pid if start_time(pid) else None
    return None


@pytest.mark.parametrize("seed", range(4))
def test_rows_do_not_depend_on_kills(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "search.py").write_text(SCRIPT)
    monkeypatch.setenv("LP_PIPE_RUNS", str(tmp_path / "all"))
    monkeypatch.chdir(tmp_path)
    create = ["experiment", "create", "search.py"]
    assert main([*create, "--mode=thread", "--run-dir=calm", "--", "--name=undisturbed"]) == 0
    folder, order = tmp_path / "all" / "experiments" / "struck", random_numbers(seed)
    command = [*create, "--run-dir=run"]
    kills: list[str] = []
    launcher = subprocess.Popen([sys.executable, "-m", "lp_pipe", *command])
    try:
        while launcher.poll() is None:
            time.sleep(order.uniform(0.1, 0.6))
            victim = a_victim(folder, order, launcher.pid) if len(kills) < MOST_KILLS else None
            if victim is None or (victim == launcher.pid and ExperimentFolder(folder).owner() is None):
                continue
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                kills.append("launcher" if victim == launcher.pid else "node")
            if victim == launcher.pid:
                launcher.wait()
                until(lambda: ExperimentFolder(folder).owner() is None)
                resume = [sys.executable, "-m", "lp_pipe", "experiment", "resume", "struck"]
                launcher = subprocess.Popen(resume)
    finally:
        launcher.kill()
    assert launcher.wait() == 0 and kills
    assert committed(folder) == committed(folder.with_name("undisturbed"))
    assert ls.open(folder).replay() == []
    with closing(Reading(folder, "loss")) as reading:
        assert all(not open_checkpoint(Path(path)).damage() for path, *_ in reading.checkpoints())


def write_until_killed(folder: Path, told: Connection) -> None:
    store = Store(folder, "loss", {})
    for record in [record for record in store.trials.values() if record.slot is not None]:
        store.slot_died(record)
    record = store.begin(0, {}, 0, None)
    while True:
        step = record.step + 1
        store.report(0, record.attempt, step, {"loss": 1.0 / step, "other": float(step)}, f"step-{step}")
        told.send(step)


def test_a_searcher_that_is_killed_in_a_write_loses_nothing_that_it_has_confirmed(tmp_path: Path) -> None:
    order, forks = random_numbers(0), multiprocessing.get_context("fork")
    last = 0
    for _ in range(100):
        told, telling = forks.Pipe(duplex=False)
        writer = forks.Process(target=write_until_killed, args=(tmp_path, telling))
        writer.start()
        telling.close()
        last = told.recv()
        deadline = time.monotonic() + order.uniform(0.0, 0.02)
        with suppress(EOFError):
            while time.monotonic() < deadline and told.poll(0.001):
                last = told.recv()
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        with suppress(EOFError):
            while True:
                last = told.recv()
        with closing(sqlite3.connect(tmp_path / "experiment.sqlite")) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        with closing(Reading(tmp_path, "loss")) as reading:
            record = reading.trials[0]
            assert last <= record.newest <= last + 1
            assert list(record.values) == list(range(1, record.newest + 1))
            assert record.checkpoint == (f"step-{record.newest}", record.newest)
    assert last > 100
