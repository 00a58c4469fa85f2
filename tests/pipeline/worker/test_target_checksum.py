"""The first and the last stage ask the feeder each for itself: what one gets belongs to what the other one gets."""

import itertools
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.worker.batch_source import BatchSource, target_checksum
from tests.pipeline.plain_loop import launched

WITHIN_S = 60.0

pytestmark = pytest.mark.usefixtures("no_leaks")


class NextOfAnIterator:
    """A feeder written like a DataLoader loop: the first stage that asks gets the sample, the other one the next."""

    def __init__(self) -> None:
        x = torch.arange(64.0).reshape(8, 8, 1)
        self._batches = iter(zip(x, 2 * x, strict=True))

    def batch(self, step: int) -> tuple[Tensor, Tensor] | None:
        return next(self._batches, None)


class AugmentedAnew:
    """Inputs are others each time, and belong to the target as well."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def batch(self, step: int) -> tuple[Tensor, Tensor] | None:
        target = torch.full((8, 1), float(step))
        return (target + torch.rand(8, 1, generator=self._generator), target) if step < 3 else None


def model() -> pp.Model:
    return pp.Model([pp.Layer(nn.Linear, 1, 1), pp.Layer(nn.Linear, 1, 1)], nn.functional.mse_loss, torch.optim.SGD)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_feeder_that_gives_the_last_stage_another_target_is_refused(schedule: str) -> None:
    """The last stage compared outputs with the next batch's targets: half of the data was lost, and all of it wrong."""
    options: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": schedule}
    with launched("thread", model(), NextOfAnIterator, **options) as pipeline:
        with pytest.raises(pp.PipelineError, match=r"step 0: .* when stages/1 asked .* not by next\(iterator\)"):
            list(pipeline.steps())
        assert pipeline.current_step() == 0


def test_inputs_that_are_augmented_at_random_are_not_refused() -> None:
    with launched("thread", model(), AugmentedAnew, stages=2, microbatches=2) as pipeline:
        assert [result.step for result in pipeline.steps()] == [0, 1, 2]


@pytest.mark.parametrize(
    "target",
    [
        torch.randint(9, (4, 300)),
        torch.randn(2, 3, 32, 32).bfloat16(),
        torch.rand(6, 4) > 0.5,
        torch.randn(8, 2, dtype=torch.complex64).conj(),
        torch.randn(5, 8)[:, ::2],
        torch.ones(4, 1).expand(4, 7),
        torch.tensor(float("nan")),
        torch.empty(0, 3),
        {"labels": torch.arange(3), "weights": (torch.rand(3), "per sample", None)},
        torch.eye(3).to_sparse(),
        None,
    ],
    ids=["long", "bf16", "bool", "conj", "strided", "expanded", "nan", "empty", "nested", "sparse", "none"],
)
def test_equal_targets_have_the_same_checksum(target: Any) -> None:
    again = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, target)
    assert target_checksum(target) == target_checksum(again)


def test_one_other_label_of_a_small_target_is_seen() -> None:
    labels = torch.arange(60)
    other = labels.clone()
    other[41] = 0
    assert target_checksum(labels) != target_checksum(other)
    assert target_checksum(labels) != target_checksum(labels.reshape(30, 2))


class EndsWithAnError:
    """A generator that has raised is at its end: a stage that asks then is told that there is no more data."""

    def __init__(self) -> None:
        self._calls = itertools.count()
        self._has_raised = threading.Event()

    def batch(self, step: int) -> tuple[Tensor, Tensor] | None:
        if step == 0:
            return torch.ones(4, 1), torch.ones(4, 1)
        if next(self._calls) == 0:  # the first stage asks ahead before the last one does
            assert self._has_raised.wait(WITHIN_S)
            return None
        self._has_raised.set()
        raise OSError("the disk is gone")


def test_what_a_feeder_raises_for_the_last_stage_is_no_end_of_the_data() -> None:
    """The training ended early, and well: what the last stage had asked for ahead was never looked at."""
    with (
        launched("thread", model(), EndsWithAnError, stages=2, microbatches=2) as pipeline,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        list(pipeline.steps())


def test_a_batch_for_one_stage_and_none_for_the_other_is_no_end_of_the_data() -> None:
    source = BatchSource(Client([(1, 1), (2, 2)]))
    assert source.get(0) == (1, 1)
    with pytest.raises(PipelineError, match="None for step 1, and another one a batch"):
        source.confirm_end(1)
    source.confirm_end(1)  # it is told once


class Client:
    """A feeder's client, whose replies are there at once."""

    def __init__(self, batches: list[Any]) -> None:
        self.futures = self
        self._batches = batches

    def batch(self, step: int) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(self._batches[step])
        return done
