"""A step that is skipped leaves what the plain loop has that leaves its batch out; so does one that always fails."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints
from tests.pipeline.delayed_gradients import DelayedLoop, buffered, stashed
from tests.pipeline.plain_loop import (
    Feeder,
    PlainLoop,
    assert_same_state,
    launched,
    layers_with_everything,
    model_with_everything,
    random_batches,
    squared_error,
)

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    # torch's, when the very first step is skipped.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`"),
]

BATCHES = random_batches([8] * 6)
CUTS = [3, 5]


class Raises(nn.Module):
    """A layer that raises for a batch that is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ArithmeticError("this batch is no good")
        return x


class Dies(nn.Module):
    """A layer whose process dies of such a batch."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def plain_without(model: pp.Model, *skipped: int) -> PlainLoop:
    """The learning rate goes on with the steps' numbers."""
    plain = PlainLoop(model, 4)
    for step, batch in enumerate(BATCHES):
        if step in skipped:
            assert plain.lr_scheduler is not None
            plain.lr_scheduler.step()
            plain.steps_done += 1
        else:
            plain.step(batch)
    return plain


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_learning_rate_and_the_random_numbers_go_on_and_nothing_else(schedule: str) -> None:
    model = model_with_everything()
    with launched("thread", model, BATCHES, stages=3, schedule=schedule, microbatches=4) as pipeline:
        for step in range(len(BATCHES)):
            if step in (0, 3):
                result = pipeline.skip_step("no reason")
                assert (result.step, result.skipped, result.why_skipped) == (step, True, "no reason")
            else:
                assert pipeline.step().step == step
        assert pipeline.current_step() == len(BATCHES)
        assert_same_state(pipeline.state_dict(), plain_without(model, 0, 3).state_dict())


@pytest.mark.parametrize(("schedule", "rules"), [("pipedream", stashed(3)), ("pipedream_2bw", buffered(3))])
def test_an_asynchronous_pipeline_is_the_delayed_loop_without_it(schedule: str, rules: Any) -> None:
    model = model_with_everything(loss=squared_error)
    with launched("thread", model, BATCHES, stages=CUTS, schedule=schedule, microbatches=4) as pipeline:
        first = next(pipeline.steps())  # leaves step 1 done, and forwards of step 2
        skipped = pipeline.skip_step()
        list(pipeline.steps())
        trained = pipeline.state_dict()
    assert (first.step, skipped.step) == (0, 2)
    loop = DelayedLoop(model, CUTS, 4, rules)
    for step, batch in enumerate(BATCHES):
        if step != 2:
            loop.step(batch)
            continue
        for scheduler in loop.schedulers:
            if scheduler is not None:
                scheduler.step()
        loop.step_index += 1
    assert_same_state(trained, loop.state_dict())


def trained(mode: str, run_dir: Path, poison: Any, stage: int, schedule: str, bad: int = 3) -> dict[str, Tensor]:
    """The state after six steps, one of which always fails in the last layer of a stage."""
    layers = layers_with_everything()
    layers.insert(CUTS[stage] if stage < 2 else 8, pp.Layer(poison))
    cuts = [cut + (stage <= index) for index, cut in enumerate(CUTS)]
    batches = [(x * float("inf") if step == bad else x, y) for step, (x, y) in enumerate(BATCHES)]
    model = model_with_everything(layers=layers)

    def train(pipeline: pp.PipelineClient) -> None:
        steps = Checkpoints({"pipeline": pipeline}).steps(pipeline, 6, save_every=2, tries=2, on_poison="skip")
        skipped = {result.step: result.why_skipped for result in steps if result.skipped}
        assert [*skipped] == [bad], skipped
        assert f"step {bad} has failed 2 times in a row, the last time in stages/" in skipped[bad]
        torch.save(pipeline.state_dict(), run_dir / "state")
        lp.stop()

    program = lp.Program("poisoned")
    feeder = program.add_node(lp.CourierNode(Feeder, batches), label="feeder")
    options: dict[str, Any] = {"microbatches": 4, "inputs": feeder, "on_failure": "restart"}
    pipeline = pp.add_pipeline(program, model, stages=cuts, schedule=schedule, **options)
    program.add_node(lp.PyNode(train, pipeline), label="trainer")
    lp.launch(program, mode, run_dir=run_dir).wait(90)
    state: dict[str, Tensor] = torch.load(run_dir / "state")
    return state


@pytest.mark.parametrize(
    ("mode", "poison", "stage", "schedule"),
    [
        ("thread", Raises, 1, "1f1b"),
        *(
            pytest.param("process", Dies, *rest, marks=pytest.mark.slow)
            for rest in ((1, "zb_h1"), (0, "gpipe"), (2, "1f1b"))
        ),
    ],
)
def test_a_batch_that_always_fails_is_left_out(
    tmp_path: Path, mode: str, poison: Any, stage: int, schedule: str
) -> None:
    state = trained(mode, tmp_path / "run", poison, stage, schedule)
    layers = layers_with_everything()
    layers.insert(CUTS[stage] if stage < 2 else 8, pp.Layer(nn.Identity))
    assert_same_state(state, plain_without(model_with_everything(layers=layers), 3).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_so_it_is_by_an_asynchronous_pipeline(tmp_path: Path, stage: int) -> None:
    state = trained("process", tmp_path / "run", Dies, stage, "pipedream")
    never = trained("thread", tmp_path / "never", Raises, stage, "pipedream")
    assert_same_state(state, never)
