"""Training has one fingerprint, for every number of workers, mode and backend: parameters, buffers, optimizer state."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from tests.data_parallel import tokens

STEPS, FEW_STEPS = 50, 8
WITHIN_S = 120


def logged_fingerprints(run: lp.Run) -> list[int]:
    """Return what each worker has logged."""
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    return [int(value) for line in lines if (value := json.loads(line)["values"].get("fingerprint"))]


@cache
def expected(steps: int) -> int:
    return tokens.plain_fingerprint(steps)


def places() -> Iterator[tuple[str, str, int]]:
    for workers in range(1, tokens.REPLICAS + 1):
        for mode, backend in (("thread", "inproc"), ("thread", "direct"), ("process", "shm"), ("process", "direct")):
            yield mode, backend, workers


def train_everywhere(launched: Any, mode: str, backend: str, workers: int, steps: int, run_dir: Path) -> list[int]:
    run = launched(tokens.program(steps, workers, backend), mode, run_dir=run_dir)
    run.wait(WITHIN_S)
    return logged_fingerprints(run)


@pytest.mark.parametrize(("mode", "backend", "workers"), [("thread", "inproc", 3), ("thread", "direct", 4)])
def test_a_few_steps_have_one_fingerprint(launched: Any, mode: str, backend: str, workers: int, tmp_path: Path) -> None:
    found = train_everywhere(launched, mode, backend, workers, FEW_STEPS, tmp_path)
    assert found == [expected(FEW_STEPS)] * workers


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "backend", "workers"), list(places()))
def test_training_has_one_fingerprint(launched: Any, mode: str, backend: str, workers: int, tmp_path: Path) -> None:
    found = train_everywhere(launched, mode, backend, workers, STEPS, tmp_path)
    assert found == [expected(STEPS)] * workers


@pytest.mark.slow
def test_gloo_has_another_fingerprint(launched: Any, tmp_path: Path) -> None:
    """Its sums of four have another order; should this fail, its place in the docs is wrong."""
    found = train_everywhere(launched, "process", "gloo", 4, STEPS, tmp_path)
    assert len(set(found)) == 1 and found[0] != expected(STEPS)
