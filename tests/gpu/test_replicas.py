"""Replicas whose model is on a GPU train to the bits of the plain loop there. `make gpu-check` runs this."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.data_parallel.loops import SEED, differences, plain_loop, train
from tests.gpu.peers import DEVICE

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]

STEPS = 8
WITHIN_S = 120


@pytest.mark.parametrize(
    ("mode", "backend", "workers"),
    [("thread", "inproc", 2), ("thread", "direct", 3), ("process", "shm", 2), ("process", "direct", 2)],
)
def test_replicas_on_a_gpu_train_as_one_process(mode: str, backend: str, workers: int, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": workers, "seed": SEED, "backend": backend, "device": DEVICE}
    dp.add_replicas(program, train, str(tmp_path), STEPS, 2, **options)
    lp.launch(program, mode=mode, run_dir=tmp_path / "run").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 4, 2, device=DEVICE)) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replicas_sum_by_nccl(tmp_path: Path) -> None:
    """NCCL's sums of two are exact: there is one addition."""
    program = lp.Program("replicas")
    options: dict[str, Any] = {"replicas": 2, "seed": SEED, "backend": "nccl", "device": DEVICE}
    dp.add_replicas(program, train, str(tmp_path), STEPS, resources=lp.Resources(gpus=1), **options)
    lp.launch(program, mode="process", run_dir=tmp_path / "run").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 2, device=DEVICE)) == []
