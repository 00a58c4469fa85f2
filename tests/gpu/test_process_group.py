"""DDP, ZeroRedundancyOptimizer and FSDP2 with models on a GPU train to a plain loop's bits over an exact group.

`make gpu-check` runs this.
"""

from pathlib import Path

import pytest
import torch

import lp_pipe as lp
from tests.collectives.test_process_group import run_torchs_wrappers
from tests.gpu.peers import DEVICE

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]


def launch(program: lp.Program, mode: str) -> lp.Run:
    return lp.launch(program, mode=mode)


def test_torchs_wrappers_on_a_gpu_train_to_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    run_torchs_wrappers(launch, 2, tmp_path, DEVICE)
