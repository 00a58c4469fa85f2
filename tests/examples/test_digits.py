"""The digits example has one result in every mode and after a resume; plain torch loads it, as the tutorial says."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from examples import digits
from lp_pipe.checkpoint import checkpoints_in, open_checkpoint
from lp_pipe.cli.main import main

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("no_leaks")

WITHIN_S = 120.0
PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def fingerprint(capfd: pytest.CaptureFixture[str], mode: str, folder: Path, **options: Any) -> str:
    lp.launch(digits.make_program(**options), mode, run_dir=folder).wait(WITHIN_S)
    (found,) = re.findall(r"sha256 (\w+)", capfd.readouterr().out)
    return str(found)


@pytest.mark.slow
def test_threads_processes_and_a_resumed_run_end_with_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = fingerprint(capfd, "thread", tmp_path / "threads", epochs=3, stages=1)
    assert fingerprint(capfd, "process", tmp_path / "processes", epochs=3) == threads

    evaluated = digits.pp.PipelineClient.evaluate
    calls = iter(range(100))

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if next(calls) == 1:
            lp.stop()
            raise SystemExit
        return evaluated(self, *args, **options)

    folder = tmp_path / "resumed"
    monkeypatch.setattr(digits.pp.PipelineClient, "evaluate", interrupted)
    lp.launch(digits.make_program(epochs=3), "thread", run_dir=folder).wait(WITHIN_S)
    monkeypatch.undo()
    assert "sha256" not in capfd.readouterr().out
    assert [open_checkpoint(path).step for path in checkpoints_in(folder / "checkpoints")][-1] == 23
    assert fingerprint(capfd, "process", folder, epochs=3) == threads

    steps = {open_checkpoint(path).step: path for path in checkpoints_in(folder / "checkpoints")}
    losses = {step: open_checkpoint(path).metrics.get("validation_loss", 9.9) for step, path in steps.items()}
    best = steps[min(losses, key=lambda step: losses[step])]
    assert main(["checkpoint", "export", str(best), "-o", str(tmp_path / "digits.safetensors")]) == 0
    (plain,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", plain], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (right,) = re.findall(r"([\d.]+)% of all digits", done.stdout)
    assert float(right) > 90


def test_the_loop_runs_to_the_end_where_nodes_are_threads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lp.launch(digits.make_program(epochs=1), "thread", run_dir=tmp_path).wait(WITHIN_S)
    assert "accuracy" in capfd.readouterr().out
