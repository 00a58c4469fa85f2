"""The data-parallel character GPT learns the same with every number of workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "char_gpt_replicas.py"
SMALL = ["--steps=4", "--context=16", "--width=24", "--layers=1", "--replicas=2"]


def test_the_parameters_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    environment = {**os.environ, "LP_PIPE_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    found = []
    for workers in (1, 2):
        command = [sys.executable, "-m", "lp_pipe", "launch", str(EXAMPLE), "--mode=thread", "--", *SMALL]
        done = subprocess.run(
            [*command, f"--workers={workers}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found += re.findall(r"parameters sha256 ([0-9a-f]{64})", done.stdout)
    assert len(found) == 2 and found[0] == found[1]
