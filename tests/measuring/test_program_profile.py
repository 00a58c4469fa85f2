"""Profiling the pipeline of a program as it is written."""

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.measuring import profiling
from lp_pipe.measuring.profiling import profile_program
from tests.pipeline.plain_loop import sgd, squared_error


class Feeder:
    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4, 2), torch.ones(4, 3)


class Bystander:
    pass


@pytest.mark.parametrize("order", ["before", "behind"])
def test_other_nodes_in_the_group_of_the_stages_are_left_out(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Before the stages, there was no pipeline for it; behind them, it ended in a bare StopIteration."""
    monkeypatch.setattr(profiling, "_SECONDS", 0.0)
    program = lp.Program("program")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    if order == "before":
        program.add_node(lp.CourierNode(Bystander), label="stages")
    model = pp.Model([nn.Linear(2, 2), nn.Linear(2, 3)], squared_error, sgd)
    pp.add_pipeline(program, model, stages=2, microbatches=2, inputs=feeder)
    if order == "behind":
        program.add_node(lp.CourierNode(Bystander), label="stages")
    profile = profile_program(program)
    assert [layer.name for layer in profile.layers] == ["0.Linear", "1.Linear"]
    assert profile.microbatches == 2
