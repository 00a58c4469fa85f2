"""Replicated training is equal, to the bit, to the loop in one process, for every number of workers."""

from pathlib import Path

import pytest

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.data_parallel.loops import SEED, differences, plain_loop, train

STEPS = 8


@pytest.mark.parametrize(
    ("replicas", "workers", "microbatches"), [(4, 1, 1), (4, 2, 2), (4, 3, 1), (4, 4, 2), (3, 2, 1)]
)
def test_threads_train_as_one_process(replicas: int, workers: int, microbatches: int, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, train, str(tmp_path), STEPS, microbatches, replicas=replicas, workers=workers, seed=SEED)
    lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(timeout=60)
    assert differences(tmp_path, *plain_loop(STEPS, replicas, microbatches)) == []
    assert len(list(tmp_path.glob("rank*.pt"))) == workers
