import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_million_actions_are_simulated_within_a_gibibyte() -> None:
    """Simulate in a process of its own, and measure its peak. The benchmark measures the time."""
    command = [sys.executable, "-m", "benchmarks.simulator", "--schedules=1f1b"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=590, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])["parties"]["1f1b"]
    assert figures["actions"] == 2 * 512 * 2048
    assert figures["makespan"] == 3 * (2048 + 511)
    assert figures["simulated_bytes"] < 2**30
