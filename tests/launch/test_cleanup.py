"""The remains of earlier runs are bounded, and results are not removed before their time."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch import cleanup
from lp_pipe.launch.cleanup import old_runs, prune_entries
from lp_pipe.launch.run_records import RunRecord, entries, live_folder
from lp_pipe.process_tree import start_time

DAY_S = 86400.0
ENDED_PID = 2**22 + 1  # above the largest that Linux gives
Made = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("LP_PIPE_RUNS")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "state" / "lp_pipe" / "runs"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def made(runs: Path) -> Made:
    """Makes the folder of a run that was changed `days` ago, with these files; newer than those made before."""

    def make(days: float = 0.0, *files: str, pid: int = ENDED_PID, record: RunRecord | None = None) -> Path:
        path = runs / f"demo-20260101-120000-{pid}-{len(list(runs.iterdir())):06d}"
        for file in files:
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).touch()
        path.mkdir(exist_ok=True)
        if record is not None:
            (path / "run.json").write_text(json.dumps(vars(record)))
        then = time.time() - days * DAY_S + len(list(runs.iterdir()))
        for one in (*path.rglob("*"), path):
            os.utime(one, (then, then))
        return path

    return make


def record(**facts: Any) -> RunRecord:
    """Write the record of a run whose launcher is dead."""
    place = {"run_dir": "x", "host": socket.gethostname(), "control": "", "socket_dir": ""}
    launcher = {"pid": ENDED_PID, "pid_started": 1, "started": 1000.0}
    return RunRecord(**{"program": "demo", "mode": "process", **place, **launcher, **facts})


def test_the_newest_runs_are_kept_and_of_the_others_those_with_young_results(made: Made, runs: Path) -> None:
    old = [made(40), made(40, "run.json", "logs/a-0.log", "failure.txt"), made(40, "checkpoints/step-00000001/x")]
    old += [made(2, "metrics.jsonl"), made(2, "events.jsonl", "graph.json", record=record(ended=2000.0))]
    young = [made(0.5, "metrics.jsonl"), made(20, "checkpoints/step-00000001/x"), made(20, "metrics.jsonl", "my.txt")]
    newest = [made(), made()]
    assert set(old_runs(runs, kept=2)) == set(old)
    assert set(old_runs(runs, kept=0)) == {*old, *newest}
    assert old_runs(runs) == []
    assert all(path.exists() for path in [*old, *young, *newest])


def test_runs_that_may_be_live_and_what_is_no_run_stay(made: Made, runs: Path) -> None:
    alive = {"pid": os.getpid(), "pid_started": start_time(os.getpid())}
    made(40, record=record(**alive))
    made(40, record=record(host="another"))
    made(40, pid=os.getpid())  # of thread mode: it has no record
    (runs / "mine").mkdir()
    (runs / "demo-20260101-120000-1-000000").write_text("a file")
    (runs / "demo-20260101-120000-2-000000").symlink_to(runs / "mine")
    assert old_runs(runs, kept=0) == []


def test_a_launch_removes_old_runs_of_the_state_folder(made: Made, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each `python file.py` left a folder for ever."""
    monkeypatch.setattr(cleanup, "_AT_MOST_S", 60.0)
    paths = [made(1) for _ in range(cleanup.KEPT_RUNS + 20)]
    program = lp.Program("failing")
    program.add_node(lp.PyNode(int, "x"), label="node")
    for _ in range(3):
        with pytest.raises(lp.NodeError):
            lp.launch(program, "thread").wait()
    # The first is kept beside the others; while it is made it is the newest of all.
    assert len(list(runs.iterdir())) <= cleanup.KEPT_RUNS + 3
    assert paths[-1].exists() and not paths[0].exists()
    monkeypatch.setenv("LP_PIPE_RUNS", str(runs))
    before = [made(1) for _ in range(20)]
    with pytest.raises(lp.NodeError):
        lp.launch(program, "thread").wait()
    assert all(path.exists() for path in before)  # a folder that the user chose is the user's to clean


def test_a_thread_run_leaves_a_folder_only_if_something_is_in_it(runs: Path) -> None:
    def write() -> None:
        (Path(lp.context().run_dir) / "result.txt").write_text("42")

    for function, files in (
        (int, None),
        (lambda: lp.log_metrics({"a": 1}), ["metrics.jsonl"]),
        (write, ["result.txt"]),
    ):
        program = lp.Program("brief")
        program.add_node(lp.PyNode(function), label="node")
        run = lp.launch(program, "thread")
        run.wait()
        left = [path.name for path in run.run_dir.iterdir()] if run.run_dir.exists() else None
        assert left == files
    assert len(list(runs.iterdir())) == 2


def test_a_run_in_the_folder_of_a_killed_one_removes_its_entry(tmp_path: Path) -> None:
    live_folder().mkdir(parents=True)
    for name in ("mine", "other"):
        folder, socket_dir = tmp_path / name, tmp_path / f"lp-{name}"
        folder.mkdir()
        socket_dir.mkdir()
        dead = record(control=f"unix:{socket_dir}/control", socket_dir=str(socket_dir), run_dir=str(folder))
        for path in (live_folder() / f"{name}.json", folder / "run.json"):
            path.write_text(json.dumps(vars(dead)))
    program = lp.Program("resumed")
    program.add_node(lp.PyNode(int), label="node")
    lp.launch(program, "thread", run_dir=tmp_path / "mine").wait()
    assert [path.stem for path in entries()] == ["other"]
    assert [path.name for path in tmp_path.glob("lp-*")] == ["lp-other"]


def test_entries_of_killed_runs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live_folder().mkdir(parents=True)
    for place in range(5):
        socket_dir = tmp_path / f"lp-{place}"
        socket_dir.mkdir()
        dead = record(control=f"unix:{socket_dir}/control", socket_dir=str(socket_dir), started=1000.0 + place)
        (live_folder() / f"{place}.json").write_text(json.dumps(vars(dead)))
    live = record(control="unix:/tmp/lp-x/control", pid=os.getpid(), pid_started=start_time(os.getpid()), started=0.0)
    (live_folder() / "live.json").write_text(json.dumps(vars(live)))
    prune_entries()
    assert len(entries()) == 6
    monkeypatch.setattr(cleanup, "_KEPT_ENTRIES", 2)
    prune_entries()
    assert {path.stem for path in entries()} == {"live", "3", "4"}
    assert sorted(path.name for path in tmp_path.glob("lp-*")) == ["lp-3", "lp-4"]
