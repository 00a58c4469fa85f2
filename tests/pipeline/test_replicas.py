"""Stages with several replicas: each runs its share of the micro-batches, and all have the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    T,
    adam,
    assert_same_state,
    launched,
    random_batches,
    sgd,
    squared_error,
    without_batch_norm,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

# 10 in 6 makes slices of 2 and five micro-batches; 3 makes three, 1 one: fewer than there are replicas.
BATCHES = random_batches([10, 3, 12, 1])


def test_gradients_are_summed_per_replica_and_then_in_rank_order() -> None:
    layers = [nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)]
    model = pp.Model(layers, squared_error, sgd)
    (batch,) = random_batches([12])
    with launched("thread", model, stages=[2], replicas=2, microbatches=4) as pipeline:
        pipeline.step(batch)
        trained = pipeline.state_dict()

    plain = nn.Sequential(*layers)  # the pipeline has trained copies of these
    sums: list[list[Tensor]] = []
    for replica in range(2):
        for j in (replica, replica + 2):  # micro-batch j runs on replica j mod 2
            x, y = batch[0].chunk(4)[j], batch[1].chunk(4)[j]
            (squared_error(plain(x), y) * 0.25).backward()
        sums.append([parameter.grad for parameter in plain.parameters() if parameter.grad is not None])
        plain.zero_grad(set_to_none=True)
    for parameter, first, second in zip(plain.parameters(), *sums, strict=True):
        parameter.grad = first + second
    sgd(plain.parameters()).step()
    assert_same_state(trained, plain.state_dict())


@pytest.mark.parametrize(
    ("schedule", "stages", "replicas", "by_layer"),
    [
        ("1f1b", [4], (2, 2), [2] * 8),
        ("gpipe", [4], (3, 3), [3] * 8),
        ("1f1b", [2, 5], (1, 3, 2), [1, 1, 3, 3, 3, 2, 2, 2]),
        ("1f1b", [2, 5], (4, 1, 2), [4, 4, 1, 1, 1, 2, 2, 2]),
        ("gpipe", [4], (2, 3), [2, 2, 2, 2, 3, 3, 3, 3]),
        ("zb_h1", [4], (1, 2), [1, 1, 1, 1, 2, 2, 2, 2]),
        ("zbv", [2, 4, 6], (2, 2), [2] * 8),
        ("interleaved", [2, 4, 6], (2, 3), [2, 2, 3, 3, 2, 2, 3, 3]),
        ("dualpipev", [2, 4, 6], (1, 1), [1] * 8),
        ("1f1b", [], (3,), [3] * 8),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, tuple)) else "",
)
def test_every_schedule_trains_to_the_same_bits(
    schedule: str, stages: list[int], replicas: tuple[int, ...], by_layer: list[int]
) -> None:
    model = without_batch_norm()
    options = {"schedule": schedule, "stages": stages, "replicas": replicas, "microbatches": 6, "clip_grad_norm": 0.1}
    plain = PlainLoop(model, 6, 0.1, replicas=by_layer)
    with launched("thread", model, BATCHES, **options) as pipeline:
        losses = [result.loss for result in pipeline.steps()]
        assert losses == pytest.approx(plain.steps(BATCHES), rel=1e-6)  # replicas add up theirs first
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_replicas_in_processes_train_to_the_same_bits_and_evaluate_between_steps() -> None:
    model = without_batch_norm()
    plain = PlainLoop(model, 6, replicas=[2, 2, 2, 2, 3, 3, 3, 3])
    with launched("process", model, BATCHES, stages=[4], replicas=(2, 3), microbatches=6) as pipeline:
        for batch in BATCHES:
            pipeline.step()
            plain.step(batch)
            assert pipeline.evaluate([BATCHES[2]]).loss == plain.evaluate(BATCHES[2])
        assert_same_state(pipeline.state_dict(), plain.state_dict())
        assert torch.equal(pipeline.forward(BATCHES[0][0]), plain.output(BATCHES[0][0]))


def test_evaluation_runs_on_all_replicas() -> None:
    model = without_batch_norm()
    plain = PlainLoop(model, 4)
    with launched("thread", model, stages=2, replicas=(2, 3), microbatches=4) as pipeline:
        losses = [plain.evaluate(batch) for batch in BATCHES]
        sizes = [len(x) for x, _ in BATCHES]
        expected = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        assert pipeline.evaluate(BATCHES).loss == pytest.approx(expected)


def test_a_stash_and_tied_weights_go_to_the_right_replicas() -> None:
    layers = [
        pp.Stash("skip", TwoWays()),
        nn.Linear(D, D),
        nn.Tanh(),
        pp.Pop("skip", Together()),
        nn.Linear(D, D),
    ]
    model = pp.Model(layers, squared_error, adam, tied=(("1.weight", "4.weight"),))
    report = pp.check(model, BATCHES, stages=[1, 3], replicas=(2, 1, 3), microbatches=6)
    assert report.equal, report
    report = pp.check(model, BATCHES, stages=[1, 3], replicas=2, microbatches=6, clip_grad_norm=0.1)
    assert report.equal, report


class TwoWays(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x * 2


class Together(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


def test_buffers_are_those_of_replica_0_on_every_replica() -> None:
    model = pp.Model([nn.Linear(D, D), nn.BatchNorm1d(T)], squared_error, sgd)
    (batch,) = random_batches([12])
    with launched("thread", model, stages=1, replicas=2, microbatches=4) as pipeline:
        pipeline.step(batch)
        trained = pipeline.state_dict()
        # Both replicas evaluate with the same statistics.
        each = pipeline.evaluate([batch]).loss
        assert pipeline.evaluate([batch, batch]).loss == each

    norm = nn.BatchNorm1d(T)
    first, _ = model.layers
    for j in (0, 2):
        norm(first(batch[0].chunk(4)[j]))
    assert torch.equal(trained["1.running_mean"], norm.running_mean)
    assert trained["1.num_batches_tracked"] == 2


class Watches(nn.Module):
    """Evaluates to what it has seen in training; a buffer is written to, replaced, or replaced by one of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positive", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.positive + self.total + self.last.sum()
        if bool(x.flatten()[0] > 0):
            self.positive += 1
        self.total = self.total + x.sum()
        self.last = x[:, 0, 0].detach().clone()
        return x


def assert_replicas_evaluate_alike(pipeline: pp.PipelineClient, replicas: int) -> None:
    first, *others = pipeline.forward_stream([torch.ones(2, T, D)] * replicas)
    assert all(torch.equal(first, other) for other in others)


def test_replicas_have_the_same_buffers_when_a_step_is_repeated_after_a_load(tmp_path: Any) -> None:
    model = pp.Model([nn.Linear(D, D), Watches(), nn.BatchNorm1d(T)], squared_error, sgd)
    (batch,) = random_batches([9])
    with launched("thread", model, stages=1, replicas=3, microbatches=3) as pipeline:
        pipeline.save(tmp_path)
        for _ in range(2):
            pipeline.step(batch)
            assert_replicas_evaluate_alike(pipeline, 3)
            pipeline.load(tmp_path)


def test_a_buffer_that_only_replica_1_has_changed_is_as_before() -> None:
    model = pp.Model([Watches(), nn.Linear(D, D)], squared_error, sgd)
    ((x, y),) = random_batches([4])
    with launched("thread", model, stages=1, replicas=2, microbatches=2) as pipeline:
        pipeline.step((torch.cat([-x[:2].abs(), x[2:].abs()]), y))  # only micro-batch 1 is positive
        assert pipeline.state_dict()["0.positive"] == 0
        assert_replicas_evaluate_alike(pipeline, 2)


def test_sparse_gradients_are_refused_where_they_would_be_added_up() -> None:
    model = pp.Model([nn.Embedding(4, D, sparse=True), nn.Linear(D, D)], squared_error, sgd)
    batch = torch.zeros(4, T, dtype=torch.long), torch.zeros(4, T, D)
    with (
        launched("thread", model, stages=2, replicas=2, microbatches=2) as pipeline,
        pytest.raises(pp.PipelineError, match="sparse"),
    ):
        pipeline.step(batch)


def test_a_checkpoint_of_replicas_is_loaded_by_any_number_of_them(tmp_path: Any) -> None:
    model = without_batch_norm()
    with launched("thread", model, BATCHES, stages=2, replicas=2, microbatches=4) as pipeline:
        next(pipeline.steps(1))
        pipeline.save(tmp_path)
        expected = pipeline.state_dict()
    assert len(list(tmp_path.glob("*.distcp"))) == 2  # replica 0 of each worker
    with launched("thread", model, BATCHES, stages=3, replicas=(1, 3, 1), microbatches=4) as pipeline:
        pipeline.load(tmp_path)
        assert_same_state(pipeline.state_dict(), expected)
        assert next(pipeline.steps(1)).step == 1


def test_a_failing_replica_is_the_error_and_the_weights_stay() -> None:
    model = pp.Model([FailsOn(7.0), nn.Linear(D, D), nn.Linear(D, D)], squared_error, adam)
    bad = BATCHES[0][0].clone()
    bad[2] = 7.0  # in micro-batch 1, which is replica 1's
    with launched("thread", model, stages=[2], replicas=2, microbatches=5) as pipeline:
        before = pipeline.state_dict()
        with pytest.raises(ValueError, match="came") as failure:
            pipeline.step((bad, BATCHES[0][1]))
        assert "micro-batch 1" in str(failure.value.__notes__)
        assert_same_state(pipeline.state_dict(), before)
        pipeline.step(BATCHES[0])  # the channels between the replicas still work


class FailsOn(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == self.value).any()):
            raise ValueError(f"{self.value} came")
        return x


@pytest.mark.parametrize("replicas", [0, -1, (2,), (1, 0), "2"])
def test_impossible_numbers_are_refused(replicas: Any) -> None:
    with (
        pytest.raises(pp.PipelineError, match="replicas="),
        launched("thread", without_batch_norm(), replicas=replicas),
    ):
        pass


def test_more_replicas_than_microbatches_are_refused() -> None:
    with (
        pytest.raises(pp.PipelineError, match="use microbatches=4 or more"),
        launched("thread", without_batch_norm(), stages=2, replicas=(4, 1), microbatches=2),
    ):
        pass
