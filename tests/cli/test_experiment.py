"""`lp_pipe experiment` creates, shows, pauses, resumes and exports searches."""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lp_pipe as lp
import lp_pipe.search as ls
from lp_pipe.cli.main import main
from lp_pipe.process_tree import start_time
from lp_pipe.search.store import ExperimentFolder
from tests.search.trial_script import trial_script
from tests.waiting import until

SCRIPT = trial_script("""
def make_program(seconds: float = 0.0):
    space = {"x": ls.uniform(0.0, 1.0), "opt": {"name": "adam"}, "seconds": seconds}
    return ls.experiment("xs", trial, space=space, searcher=ls.Halving("loss", 4, 4, divisor=2), slots=2)
""")


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "search.py").write_text(SCRIPT)
    monkeypatch.setenv("LP_PIPE_RUNS", str(tmp_path / "all"))
    monkeypatch.chdir(tmp_path)
    yield "search.py"


def json_lines(capsys: pytest.CaptureFixture[str], *command: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["experiment", *command, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_experiment_from_its_preview_to_its_export(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["experiment", "preview", target]) == 0
    assert "4 trials, 8 steps" in capsys.readouterr().out
    assert main(["experiment", "create", target, "--mode=thread", "--run-dir=run"]) == 0
    (listed,) = json_lines(capsys, "ls")
    assert (listed["name"], listed["state"], listed["trials"]) == ("xs", "ended", 4)
    trials = json_lines(capsys, "show", "x")
    assert sorted(str(one["state"]) for one in trials) == ["finished"] + ["stopped"] * 3
    (best,) = json_lines(capsys, "best", "-")
    assert best["params"]["opt"] == {"name": "adam"} and Path(str(best["checkpoint"])).is_dir()  # type: ignore[index]
    assert json_lines(capsys, "compare", "xs")[0]["id"] == best["trial"]
    (one,) = json_lines(capsys, "show", f"xs/{best['trial']}")
    assert one["step"] == 4 and len(one["curve"]) == 4  # type: ignore[arg-type]
    assert main(["experiment", "export", "xs", "--csv=rows.csv"]) == 0
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert len(rows) == 2 * 8 and set(rows[0]) == {"trial", "step", "name", "value"}
    assert main(["experiment", "gc", "xs"]) == 0


def test_a_paused_experiment_is_resumed_also_after_its_launcher_was_killed(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "lp_pipe", "experiment", "create", target, "--run-dir=run", "--", "--seconds=0.3"]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    folder = tmp_path / "all" / "experiments" / "xs"

    def num_trained_lines() -> int:
        return sum(path.read_text().count("trained") for path in tmp_path.glob("run/logs/**/*") if path.is_file())

    try:
        until(lambda: ExperimentFolder(folder).owner())
        until(lambda: len(ls.open(folder).rows()) > 0)
        assert main(["experiment", "resume", "xs"]) == 2  # it is not paused
        assert main(["experiment", "pause", "xs"]) == 0
        until(lambda: json_lines(capsys, "ls")[0]["state"] == "paused")
        count = len(ls.open(folder).rows())
        assert main(["experiment", "resume", "xs"]) == 0
        until(lambda: len(ls.open(folder).rows()) > count)
        until(lambda: num_trained_lines() * 2 >= len(ls.open(folder).rows()))  # a killed launcher loses what it reads
    finally:
        launcher.kill()
        launcher.wait()
    owner = ExperimentFolder(folder).owner()
    until(lambda: owner is None or not start_time(owner))
    assert main(["experiment", "pause", "xs"]) == 2  # nobody would answer
    assert main(["experiment", "resume", "xs"]) == 0
    rows = [row for row in ls.open(folder).rows() if row.name == "step"]
    assert len(rows) == 8 and all(row.value == row.step for row in rows)
    (best,) = json_lines(capsys, "best", "xs")
    assert main(["experiment", "logs", f"xs/{best['trial']}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    trained = [line.partition("] ")[2] for line in lines if "trained" in line]
    assert set(trained) == {f"trained {n}" for n in (1, 2, 3, 4)}  # the step that the kill cut off came again


def test_an_unknown_experiment_is_answered_with_the_nearest(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "create", target, "--mode=thread", "--run-dir=run"]) == 0
    assert main(["experiment", "show", "xz"]) == 2
    assert "xs" in capsys.readouterr().err
    assert main(["experiment", "show", "xs/9"]) == 2
    assert main(["experiment", "kill", "xs"]) == 2


def test_rows_are_exported_to_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    program = ls.experiment(
        "tracked", report_twice, space={"x": 0.5}, searcher=ls.Single(2, "loss"), folder=tmp_path / "tracked"
    )
    lp.launch(program, "thread").wait(30.0)
    assert main(["experiment", "export", str(tmp_path / "tracked"), f"--mlflow={tmp_path / 'runs'}"]) == 0
    client = tracking.MlflowClient(tracking_uri=str(tmp_path / "runs"))
    (run,) = client.search_runs([client.get_experiment_by_name("tracked").experiment_id])
    assert run.data.params == {"x": "0.5"}
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")] == [(1, 0.5), (2, 1.0)]


def report_twice(t: ls.Trial) -> None:
    for step in t.steps():
        t.report({"loss": t.params["x"] * step})
