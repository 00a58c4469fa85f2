"""The metrics that a loss function returns beside its scalar: one value for a step, and one for an evaluation."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.loss_metrics import Totals, add_metrics, merged, results, scaled
from tests.pipeline.plain_loop import launched, sgd

LABELS = torch.tensor([0, 1, 1, 1, 2, 0, 3, 3])


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    metrics: dict[str, Any] = {
        "samples": pp.Sum(len(target)),
        "largest": pp.Max(target.max()),
        "confusion": pp.Sum(torch.bincount(target, minlength=4)),
        "label": target.float().mean(),
        "labels": target.float().mean(dim=0, keepdim=True),
    }
    positives = (target == 0).sum()
    if positives:
        metrics["recall"] = 1.0  # only where there are positives
        metrics["precision"] = pp.Mean(positives / len(target), weight=len(target) * 10)
    return nn.functional.cross_entropy(output, target), metrics


def of_all(labels: Tensor) -> dict[str, Any]:
    return {
        "samples": len(labels),
        "largest": labels.max().item(),
        "confusion": torch.bincount(labels, minlength=4).tolist(),
        "label": pytest.approx(labels.float().mean().item()),
        "labels": [pytest.approx(labels.float().mean().item())],
        "recall": 1.0,
    }


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("thread", {"stages": 2}),
        ("thread", {"stages": 1, "replicas": 2}),
        ("thread", {"stages": 2, "loss_weight": "one"}),
        ("process", {"stages": 1, "replicas": 2}),
    ],
    ids=str,
    indirect=["mode"],
)
def test_each_metric_becomes_one_value_of_the_step_and_of_the_evaluation(mode: str, options: dict[str, Any]) -> None:
    options = dict(options)
    rule = options.pop("loss_weight", "samples")
    layers = [nn.Linear(8, 8), nn.Linear(8, 5)]
    model = pp.Model(layers, loss, sgd, loss_weight=rule)
    x = torch.randn(8, 8)
    with launched(mode, model, microbatches=4, **options) as pipeline:
        step = plain(pipeline.step((x, LABELS)).metrics)
        assert step.pop("precision") == pytest.approx(0.5), "two micro-batches of two have one positive each"
        assert step == of_all(LABELS)
        for repeats in (1, 10):  # the second one in windows
            batches = [(x, LABELS), (x[:4], LABELS[:4])] * repeats
            evaluated = plain(pipeline.evaluate(batches).metrics)
            evaluated.pop("precision")
            labels = torch.cat([target for _, target in batches])
            expected = of_all(labels)
            if rule == "one":  # a batch counts as much as another one
                means = [target.float().mean().item() for _, target in batches]
                expected["label"] = pytest.approx(sum(means) / len(means))
                expected["labels"] = [expected["label"]]
            assert evaluated == expected


def test_a_metric_that_no_micro_batch_has_is_not_there() -> None:
    totals: Totals = {}
    add_metrics(totals, {"none": pp.Mean(float("nan"), weight=0)}, 0.5)
    assert results(totals) == {}


def test_nan_is_the_largest() -> None:
    totals: Totals = {}
    for value in (1.0, float("nan"), 2.0):
        add_metrics(totals, {"worst": pp.Max(value)}, 1.0)
    assert str(results(totals)["worst"]) == "nan"


def test_windows_weigh_as_much_as_their_samples() -> None:
    small: Totals = {}
    large: Totals = {}
    add_metrics(small, {"plain": 1.0, "own": pp.Mean(1.0, weight=3)}, 1.0)
    add_metrics(large, {"plain": 4.0, "own": pp.Mean(4.0, weight=1)}, 1.0)
    assert results(merged([scaled(small, 0.25), scaled(large, 0.75)])) == {"plain": 3.25, "own": 1.75}


@pytest.mark.parametrize(
    ("one", "other"),
    [(pp.Sum(1), 1.0), (pp.Max(1), pp.Mean(1, 1)), (pp.Sum(torch.ones(2)), pp.Sum(torch.ones(3)))],
    ids=["sum and plain", "max and mean", "shapes"],
)
def test_a_metric_that_differs_between_micro_batches_is_named(one: Any, other: Any) -> None:
    totals: Totals = {}
    add_metrics(totals, {"mine": one}, 0.5)
    with pytest.raises(pp.PipelineError, match="'mine'"):
        add_metrics(totals, {"mine": other}, 0.5)
