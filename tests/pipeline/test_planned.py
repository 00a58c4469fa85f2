"""Pipelines that are cut by a plan."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import lp_pipe as lp
import lp_pipe.pipeline as pp


def sgd(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_model() -> pp.Model:
    layers = [pp.Layer(nn.Linear, 4, 4, name="first"), nn.Tanh(), pp.Layer(nn.Linear, 4, 2)]
    return pp.Model(layers, functional.mse_loss, sgd)


PLAN = pp.Plan((pp.PlannedStage(("0.first", "1.Tanh"), 2, 1.0), pp.PlannedStage(("2.Linear",), 1, 1.0)), 1.0)


def losses(**options: object) -> list[float]:
    program = lp.Program("planned")
    pipeline = pp.add_pipeline(program, make_model(), microbatches=4, **options)  # type: ignore[arg-type]
    batch = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)
    with lp.launch(program, "thread") as run:
        client = run.client(pipeline)
        return [client.step(batch).loss for _ in range(2)]


def test_a_profiled_model_is_cut_and_replicated_as_planned() -> None:
    profile = pp.profile(make_model(), torch.ones(2, 4), torch.ones(2, 2))
    plan = pp.partition(profile, pp.Topology([pp.Level("device", 3, bandwidth=1e12)]))
    assert [name for stage in plan.stages for name in stage.layers] == ["0.first", "1.Tanh", "2.Linear"]
    assert losses(stages=plan) == pytest.approx(losses(stages=1))


def test_a_plan_means_its_cuts_and_its_replicas() -> None:
    assert losses(stages=PLAN) == losses(stages=[2], replicas=[2, 1])


def test_a_plan_for_another_model_is_refused_at_setup() -> None:
    other = replace(PLAN, stages=PLAN.stages[:1])
    with pytest.raises(pp.PartitionError, match=r"another model: it has 2 layers, the model 3; .* '2.Linear'"):
        pp.add_pipeline(lp.Program("planned"), make_model(), stages=other)


def test_replicas_beside_a_plan_are_refused() -> None:
    with pytest.raises(pp.PipelineError, match="the plan of stages= says how many"):
        pp.add_pipeline(lp.Program("planned"), make_model(), stages=PLAN, replicas=2)
