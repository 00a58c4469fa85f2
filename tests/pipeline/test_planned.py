"""Pipelines that are cut by a plan."""

from dataclasses import replace
from typing import ClassVar

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


class Feeder:
    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(8, 4), torch.ones(8, 2)


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


class Counted(nn.Linear):
    """Remembers the calls of all copies, since stages of thread mode share the process."""

    calls: ClassVar[list[str]] = []

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls.append(self.name)
        return super().forward(x)


def calls(**options: object) -> tuple[int, int]:
    """Return the calls of a first and a last layer, on two stages, in a step of 4 micro-batches."""
    layers = [pp.Layer(Counted, "first", 4, 4, name="first"), pp.Layer(Counted, "last", 4, 2, name="last")]
    program = lp.Program("counted")
    model = pp.Model(layers, functional.mse_loss, sgd)
    pipeline = pp.add_pipeline(program, model, microbatches=4, **options)  # type: ignore[arg-type]
    Counted.calls.clear()
    with lp.launch(program, "thread") as run:
        run.client(pipeline).step((torch.ones(8, 4), torch.ones(8, 2)))
    return Counted.calls.count("first"), Counted.calls.count("last")


def test_the_stages_that_the_plan_says_recompute_unless_the_user_says_which() -> None:
    stages = pp.PlannedStage(("0.first",), 1, 1.0, recompute="full"), pp.PlannedStage(("1.last",), 1, 1.0)
    plan = pp.Plan(stages, 1.0)
    assert calls(stages=plan) == (8, 4)
    assert calls(stages=plan, recompute="none") == (4, 4)
    assert calls(stages=replace(plan, stages=(stages[0], replace(stages[1], recompute="full")))) == (8, 8)


def test_the_plans_schedule_is_used_unless_the_user_names_one() -> None:
    plan = replace(PLAN, stages=(replace(PLAN.stages[0], replicas=1), PLAN.stages[1]), schedule="gpipe")
    assert order(stages=plan) == "FFFFBBBB"
    assert order(stages=plan, schedule="1f1b") == "FFBFBFBB"
    assert order(stages=replace(plan, schedule=None)) == "FFBFBFBB"


def order(**options: object) -> str:
    """Return the first stage's actions in a step."""
    program = lp.Program("planned")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    pipeline = pp.add_pipeline(program, make_model(), microbatches=4, inputs=feeder, **options)  # type: ignore[arg-type]
    with lp.launch(program, "thread") as run:
        (trace,) = run.client(pipeline).trace(1)
    return "".join(letter for action, _, _ in trace.workers[0] for letter in action if letter in "FB")


def test_a_schedule_with_several_stages_on_a_worker_is_refused() -> None:
    with pytest.raises(pp.PartitionError, match="'zbv' runs 2 stages on each worker, but a plan has one worker"):
        pp.add_pipeline(lp.Program("planned"), make_model(), stages=PLAN, schedule="zbv")


def test_a_plan_for_another_model_is_refused_at_setup() -> None:
    other = replace(PLAN, stages=PLAN.stages[:1])
    with pytest.raises(pp.PartitionError, match=r"another model: it has 2 layers, the model 3; .* '2.Linear'"):
        pp.add_pipeline(lp.Program("planned"), make_model(), stages=other)


def test_replicas_beside_a_plan_are_refused() -> None:
    with pytest.raises(pp.PipelineError, match=r"replicas=.*the plan in stages="):
        pp.add_pipeline(lp.Program("planned"), make_model(), stages=PLAN, replicas=2)
