"""`lp_pipe launch --engine=slurm` outside an allocation, as far as it needs no Slurm."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from lp_pipe.cli.main import main

SLURM = ["--mode=multi_host", "--engine=slurm"]


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise RuntimeError('only inside the job')")


def test_dry_run_shows_the_job_that_would_be_submitted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = ["launch", "train.py", *SLURM, "--hosts=4", "--time=10", "--dry-run"]
    assert main([*own, "--", "--steps=3", "--dry-run"]) == 0
    command, shell, run, _ = capsys.readouterr().out.splitlines()
    assert command.startswith(f"sbatch --job-name=lp_pipe-train --output={tmp_path}/slurm-%j.out --nodes=4 ")
    assert "--time=10" in command and shell == "#!/bin/sh"
    inside = ["launch", "train.py", *SLURM, "--hosts=4", "--time=10", "--", "--steps=3", "--dry-run"]
    assert shlex.split(run) == ["exec", sys.executable, "-u", "-m", "lp_pipe", *inside]


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        (["train.py"], 2, "--hosts=4"),
        (["train.py", "--hosts=4:gpus=2"], 2, "hosts='4:gpus=2'"),
        (["train.py", "--hosts=4", "--ssh-config=x"], 2, "has no option 'ssh_config'"),
        (["trian.py", "--hosts=4"], 2, "file trian.py does not exist"),
    ],
)
def test_what_cannot_be_submitted_is_said(
    arguments: list[str], status: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *arguments, *SLURM]) == status
    assert what in capsys.readouterr().err


def test_without_sbatch_nothing_is_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "train.py", *SLURM, "--hosts=4"]) == 3
    assert "cannot submit train.py: engine 'slurm': cannot run sbatch" in capsys.readouterr().err
