"""An error of a process that is out of memory names the options that would need less."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from lp_pipe.training.memory_advice import advice_for_pipeline, is_out_of_memory

TOO_LARGE = 1 << 46


class Huge(nn.Module):
    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.table = torch.empty(TOO_LARGE if at_once else 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(TOO_LARGE)[0]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stage_that_is_out_of_memory_names_zero(at_once: bool, tmp_path: Path) -> None:
    program = lp.Program("huge")
    model = pp.Model([nn.Linear(2, 2), pp.Layer(Huge, at_once=at_once)], F.mse_loss, torch.optim.SGD)
    pipeline = pp.add_pipeline(program, model, stages=[1], microbatches=2)

    def train(pipeline: pp.PipelineClient) -> None:
        pipeline.step((torch.ones(4, 2), torch.ones(4, 2)))

    program.add_node(lp.PyNode(train, pipeline), label="trainer")
    with pytest.raises(lp.NodeError, match=r"(?s)allocate.*zero=1.*pp\.memory"):
        lp.launch(program, "thread", run_dir=tmp_path / "run").wait(60)


def test_a_worker_that_is_out_of_memory_names_zero(tmp_path: Path) -> None:
    def train(replica: dp.Replica) -> None:
        Huge(at_once=True)

    program = lp.Program("huge")
    dp.add_replicas(program, train, replicas=1)
    with pytest.raises(lp.NodeError, match=r"(?s)allocate.*zero=1"):
        lp.launch(program, "thread", run_dir=tmp_path / "run").wait(60)


def test_only_what_can_be_done_is_advised() -> None:
    assert "zero=1 or more with replicas=2 or more" in advice_for_pipeline(0, 1, 1)
    assert "zero=2 or more," in advice_for_pipeline(1, 4, 1)
    assert "zero" not in advice_for_pipeline(3, 4, 1) and "zero" not in advice_for_pipeline(1, 4, 2)
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("no"))
