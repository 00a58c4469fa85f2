"""Evaluations between steps see the model as it is, and leave it so."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    T,
    assert_same_state,
    launched,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")

Batch = tuple[Tensor, Tensor]
BATCHES = random_batches([6, 6, 6, 6])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_evaluation_between_steps_changes_nothing(schedule: str) -> None:
    """Another batch size, other numbers of batches, before, between and after: training goes on as if never asked."""
    model = model_with_everything()
    plain = PlainLoop(model, 4)
    before = torch.get_rng_state()
    with launched("thread", model, BATCHES, stages=3, schedule=schedule, microbatches=4) as pipeline:
        for step in range(4):
            for batch in random_batches([1, 7, 2]):
                fingerprint = pipeline.fingerprint()
                assert pipeline.evaluate([batch]).loss == plain.evaluate(batch)
                assert torch.equal(pipeline.forward(batch[0]), plain.output(batch[0]))
                assert pipeline.fingerprint() == fingerprint
            assert pipeline.step().loss == plain.step(BATCHES[step])
        assert pipeline.evaluate([BATCHES[0]]).loss == plain.evaluate(BATCHES[0])
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_is_a_mean_over_its_batches() -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 2)
    batches = random_batches([4, 4, 2, 1, 1])
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        loss, metrics = pipeline.evaluate(iter(batches))  # type: ignore[arg-type]
        again = pipeline.evaluate([list(batch) for batch in batches])  # type: ignore[misc]
    expected = sum(plain.evaluate(batch) * len(batch[0]) for batch in batches) / 12
    assert loss == pytest.approx(expected) and again == (loss, metrics)
    assert metrics["count"] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2 + 1 + 1) / 12)


def test_an_output_is_that_of_plain_torch_without_gradients() -> None:
    """Without gradients nn.TransformerEncoder takes another path, whose last bits differ."""
    model = pp.Model([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)], squared_error, sgd)
    x = random_batches([5], 8)[0][0]
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        pipeline.step((x, x))
        output, streamed = pipeline.forward(x), next(pipeline.forward_stream([x, x[:2]]))
        plain = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)))
        plain.load_state_dict(pipeline.state_dict())
    with torch.no_grad():
        expected = plain.eval()(x)
    assert torch.equal(output, expected) and torch.equal(streamed, expected)


@pytest.mark.parametrize(
    ("mode", "stages"),
    [("thread", 1), ("thread", 3), pytest.param("process", 3, marks=pytest.mark.slow)],
    indirect=["mode"],
)
def test_a_loader_is_read_in_windows_and_all_of_them_see_the_same_weights(mode: str, stages: int) -> None:
    model = model_with_everything()
    batches = random_batches([4, 2, 1, 4, 3] * 8)
    read = 0
    with launched(mode, model, stages=stages, microbatches=2) as pipeline:

        def loader() -> Iterator[Batch]:
            nonlocal read
            for batch in batches:
                read += 1
                if read == 20:  # another client trains: its step has to wait for the end of the evaluation
                    steps.append(other.submit(pipeline.step, batch))
                yield batch

        steps: list[Future[pp.StepResult]] = []
        with ThreadPoolExecutor() as other:
            result = pipeline.evaluate(loader())
            after = steps[0].result(60)
        plain = PlainLoop(model, 2)
        losses = [plain.evaluate(batch) * len(batch[0]) for batch in batches]
        samples = sum(len(x) for x, _ in batches)
        assert result.loss == pytest.approx(sum(losses) / samples)
        counts = [len(x) ** 2 for x, _ in batches]
        assert result.metrics["count"] == pytest.approx(sum(counts) / samples)
        assert after.step == 0
        assert pipeline.evaluate(batches).loss != result.loss


def test_a_loader_that_fails_leaves_the_pipeline_free() -> None:
    def loader() -> Iterator[Batch]:
        yield from random_batches([2] * 30)
        raise OSError("no more files")

    with launched("thread", model_with_everything(), stages=2, microbatches=2) as pipeline:
        with pytest.raises(OSError, match="no more files"):
            pipeline.evaluate(loader())
        with pytest.raises(pp.PipelineError):
            pipeline.evaluate([*random_batches([2] * 20), "no batch"])  # type: ignore[list-item]
        assert pipeline.evaluate(random_batches([2])).loss > 0


def test_a_client_that_dies_in_an_evaluation_leaves_the_pipeline_free(tmp_path: Path) -> None:
    """The evaluator is killed between two windows; the trainer's step must not wait for it for ever."""
    flag = tmp_path / "evaluating"

    def evaluator(pipeline: pp.PipelineClient) -> None:
        def loader() -> Iterator[Batch]:
            yield from random_batches([2] * 30)
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        pipeline.evaluate(loader())

    def trainer(pipeline: pp.PipelineClient) -> None:
        until(flag.exists)
        pipeline.step(random_batches([2])[0])
        lp.stop()

    program = lp.Program("dies")
    handle = pp.add_pipeline(program, model_with_everything(), stages=2, microbatches=2)
    with program.group("evaluator", on_failure="ignore"):
        program.add_node(lp.PyNode(evaluator, handle))
    program.add_node(lp.PyNode(trainer, handle), label="trainer")
    lp.launch(program, "process", run_dir=tmp_path / "run").wait(60)


class Noise(nn.Module):
    """Draws in eval mode, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_a_layer_that_draws_in_eval_mode_leaves_torchs_generator_alone() -> None:
    model = pp.Model([pp.Layer(Noise), pp.Layer(nn.Linear, D, D), pp.Layer(Noise)], squared_error, sgd)
    before = torch.get_rng_state()
    outputs = []
    for stages in (1, 3):
        with launched("thread", model, stages=stages) as pipeline:
            outputs.append(pipeline.forward(BATCHES[0][0]))
    assert torch.equal(*outputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_in_eval_mode_stays_so() -> None:
    """Frozen BatchNorm: its statistics stay, the BatchNorm beside it goes on, evaluations in between or not."""
    frozen = nn.BatchNorm1d(T).eval().requires_grad_(False)
    frozen.running_mean = torch.ones(T)
    model = pp.Model([nn.Linear(D, D), frozen, nn.Dropout(0.5).eval(), nn.BatchNorm1d(T)], squared_error, sgd)
    plain = PlainLoop(model, 2)
    with launched("thread", model, BATCHES, stages=2, microbatches=2) as pipeline:
        for batch in BATCHES:
            pipeline.evaluate([batch])
            assert pipeline.step().loss == plain.step(batch)
        state = pipeline.state_dict()
        assert_same_state(state, plain.state_dict())
    assert state["1.running_mean"].tolist() == [1.0] * T
    assert state["1.num_batches_tracked"] == 0 and state["3.num_batches_tracked"] == 8


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_input_that_comes_several_times_is_the_same_each_time(replicas: int) -> None:
    model = pp.Model([Doubles(), nn.Linear(D, D)], squared_error, sgd)
    ((x, y),) = random_batches([4])
    with launched("thread", model, stages=1, replicas=replicas, microbatches=2) as pipeline:
        first, *others = pipeline.forward_stream([x] * 4)
        assert all(torch.equal(first, other) for other in others)
        assert pipeline.evaluate([(x, y)] * 4).loss == pipeline.evaluate([(x, y)]).loss
