"""The data-parallel residual network learns the digits, and the same with every number of workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "resnet_replicas.py"
BOTH = """
import sys
sys.path.insert(0, sys.argv[1])
import lp_pipe as lp
import lp_pipe.data_parallel as dp
import resnet_replicas as example

for workers in (1, 3):
    program = lp.Program("digits")
    dp.add_replicas(program, example.train, 1, 300, 4, replicas=4, workers=workers, seed=example.SEED)
    lp.launch(program, mode="thread").wait()
"""


def printed(command: list[str], tmp_path: Path) -> tuple[list[float], list[str]]:
    """Return the accuracies and fingerprints that a command prints."""
    environment = {**os.environ, "LP_PIPE_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = re.findall(r"accuracy ([\d.]+) on 297", done.stdout)
    return [float(one) for one in accuracies], re.findall(r"parameters sha256 ([0-9a-f]{64})", done.stdout)


def test_what_is_learnt_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    accuracies, fingerprints = printed(["-c", BOTH, str(EXAMPLE.parent)], tmp_path)
    assert len(fingerprints) == 2 and fingerprints[0] == fingerprints[1] and accuracies[0] == accuracies[1]


@pytest.mark.slow
def test_the_digits_are_learnt_in_processes(tmp_path: Path) -> None:
    (accuracy,), _ = printed(["-m", "lp_pipe", "launch", str(EXAMPLE), "--mode=process"], tmp_path)
    assert accuracy > 0.9
