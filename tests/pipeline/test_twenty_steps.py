"""Twenty steps with all features at once: dropout, tied weights, a skip, clipping, recompute, precision, replicas."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.plain_loop import PlainLoop
from tests.pipeline.plain_loop import D, adam, assert_same_state, launched, random_batches, squared_error

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.slow]

BATCHES = random_batches([9, 4, 10, 2, 7] * 4)
SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev", "auto"]
CHUNKS = {"interleaved": 2, "looped_bfs": 2, "zbv": 2, "dualpipev": 2}


class Keeps(nn.Module):
    """Half of it flows on, all of it skips."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 0.5, x


class Adds(nn.Module):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return x + kept


def model() -> pp.Model:
    layers = [
        pp.Layer(nn.Linear, D, D),
        pp.Layer(nn.Dropout, 0.2),
        pp.Stash("past", Keeps()),
        pp.Layer(nn.Linear, D, 2 * D),
        pp.Layer(nn.GELU),
        pp.Layer(nn.LayerNorm, 2 * D),
        pp.Layer(nn.Linear, 2 * D, D),
        pp.Pop("past", Adds()),
        pp.Layer(nn.Dropout, 0.4),
        pp.Layer(nn.Linear, D, D),
    ]
    return pp.Model(layers, squared_error, adam, tied=(("0.weight", "9.weight"),), seed=11)


CASES = [
    (schedule, stages, recompute, precision)
    for schedule, stages in itertools.product(SCHEDULES, (1, 2, 3, 4))
    for recompute, precision in (("none", "bf16"), ("full", "fp32"), (("every", 2), "bf16"), ("none", "fp32"))
]


@pytest.mark.parametrize(("schedule", "stages", "recompute", "precision"), CASES, ids=str)
def test_every_schedule_cut_and_option(schedule: str, stages: int, recompute: Any, precision: str) -> None:
    options: dict[str, Any] = {"clip_grad_norm": 0.5, "precision": precision}
    microbatches = 8 if schedule == "dualpipev" else 4
    plain = PlainLoop(model(), microbatches, 0.5, precision, [1] * 10)
    torch.set_num_threads(1)
    options |= {"stages": stages, "schedule": schedule, "microbatches": microbatches, "recompute": recompute}
    with launched("thread", model(), BATCHES, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == [plain.step(batch) for batch in BATCHES]
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("replicas", [(2, 2), (1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_of_every_schedule(schedule: str, replicas: tuple[int, int]) -> None:
    cuts = [5] if schedule not in CHUNKS else [2, 5, 8]
    options: dict[str, Any] = {"schedule": schedule, "stages": cuts, "replicas": replicas, "microbatches": 12}
    report = pp.check(model(), BATCHES, clip_grad_norm=0.5, recompute="full", **options)
    assert report.equal, report
