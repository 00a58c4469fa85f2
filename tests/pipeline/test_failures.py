"""Stages that fail within a step: each caller is told why, nothing hangs, and nothing is half done."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import (
    D,
    Feeder,
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    random_batches,
    squared_error,
)

WITHIN_S = 20.0
BATCHES = random_batches([8] * 12)
STAGES = 3
FAILS_AT = 2  # the micro-batch, of 4


class Boom(ValueError):
    """A user's own error."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class Trap(nn.Module):
    """Passes its input on. Where the trigger file is there, micro-batch 2 springs it instead, once."""

    def __init__(self, trigger: Path, how: str = "raise") -> None:
        super().__init__()
        self.trigger, self.how = trigger, how
        self.seen = {"forward": 0, "backward": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.spring("forward")
        if self.training:
            x.register_hook(lambda gradient: self.spring("backward"))
        return x

    def spring(self, phase: str) -> None:
        path = self.trigger.with_suffix(f".{phase}")
        if not path.exists():
            return
        self.seen[phase] += 1
        if self.seen[phase] > FAILS_AT:
            self.seen[phase] = 0
            path.unlink()
            ACTIONS[self.how](path.name)


def _raise(where: str) -> None:
    raise Boom(where)


def _raise_without_a_message(where: str) -> None:
    raise KeyError


def _exit(where: str) -> None:
    raise SystemExit(3)


def _kill(where: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS = {"raise": _raise, "raise without a message": _raise_without_a_message, "exit": _exit, "kill": _kill}


def model_with_traps(folder: Path, how: str = "raise") -> pp.Model:
    """Three stages of three layers, a trap in the middle of each."""
    layers: list[pp.Layer] = []
    for stage in range(STAGES):
        trap = pp.Layer(Trap, folder / f"stage{stage}", how)
        layers += [pp.Layer(nn.Linear, D, D), trap, pp.Layer(nn.Dropout, 0.3)]
    return pp.Model(layers, squared_error, adam)


OPTIONS: dict[str, Any] = {"stages": [3, 6], "microbatches": 4}


@pytest.mark.parametrize(("mode", "schedule"), [("thread", "1f1b"), ("thread", "gpipe"), ("process", "1f1b")])
def test_a_layer_that_raises_fails_the_step_and_nothing_else(
    mode: str, schedule: str, tmp_path: Path, no_leaks: None
) -> None:
    model = model_with_traps(tmp_path)
    plain = PlainLoop(model, 4)
    with launched(mode, model, BATCHES, schedule=schedule, **OPTIONS) as pipeline:
        pipeline.step()
        plain.step(BATCHES[0])
        for step, (stage, phase) in enumerate([(s, p) for p in ("forward", "backward") for s in range(STAGES)], 1):
            (tmp_path / f"stage{stage}.{phase}").touch()
            with pytest.raises(Boom) as caught:
                pipeline.step()
            assert isinstance(caught.value, lp.RemoteError)
            assert caught.value.where == f"stage{stage}.{phase}"
            assert f"in stages/{stage}, {phase} of micro-batch {FAILS_AT}, stage {stage} (layers" in str(caught.value)
            assert f"step {step}" in str(caught.value)
            assert (f"in layer {3 * stage + 1}.Trap" in str(caught.value)) == (phase == "forward")

            assert_same_state(pipeline.state_dict(), plain.state_dict())
            assert pipeline.current_step() == step
            assert pipeline.step().loss == plain.step(BATCHES[step])  # the same batch again, the same dropout
            assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_a_loss_that_raises_says_that_it_is_the_loss() -> None:
    model = pp.Model([pp.Layer(nn.Linear, D, 2)], lambda y, t: nn.functional.nll_loss(y, t + 7), adam)
    with launched("thread", model, stages=1, microbatches=1) as pipeline:
        with pytest.raises(IndexError, match="is out of bounds") as caught:
            pipeline.step((torch.ones(4, D), torch.zeros(4, dtype=torch.long)))
        assert "\nin the loss\n" in str(caught.value)


def test_a_loss_weight_that_raises_says_where() -> None:
    def weight(target: Tensor) -> float:
        raise Boom("weight")

    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, adam, loss_weight=weight)
    where = "in stages/1, before the first micro-batch of step 0"
    with launched("thread", model, stages=2) as pipeline, pytest.raises(Boom, match=where):
        pipeline.step(BATCHES[0])


@pytest.mark.parametrize("stage", range(STAGES))
def test_an_evaluation_may_fail_as_well(stage: int, tmp_path: Path, no_leaks: None) -> None:
    model = model_with_traps(tmp_path)
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, **OPTIONS) as pipeline:
        (tmp_path / f"stage{stage}.forward").touch()
        with pytest.raises(Boom, match=rf"stage {stage} \(layers .*\), in eval mode"):  # which is no step
            pipeline.evaluate(BATCHES)
        assert pipeline.evaluate(BATCHES[:1]).loss == plain.evaluate(BATCHES[0])
        assert pipeline.step().loss == plain.step(BATCHES[0])


@pytest.mark.parametrize(("how", "type_name"), [("raise without a message", "KeyError"), ("exit", "SystemExit")])
@pytest.mark.parametrize("stage", [0, 1])
def test_no_way_to_raise_hangs(how: str, type_name: str, stage: int, tmp_path: Path, no_leaks: None) -> None:
    """An error without a message was one too many for the conductor, and SystemExit: it left the others waiting."""
    model = model_with_traps(tmp_path, how)
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, **OPTIONS) as pipeline:
        (tmp_path / f"stage{stage}.forward").touch()
        with pytest.raises(lp.RemoteError) as caught:
            pipeline.step()
        assert caught.value.type_name == type_name
        assert f"in stages/{stage}, forward of micro-batch" in str(caught.value)
        assert pipeline.step().loss == plain.step(BATCHES[0])


def test_stages_on_one_worker_fail_alike(tmp_path: Path, no_leaks: None) -> None:
    model = model_with_traps(tmp_path)
    plain = PlainLoop(model, 4)
    options = {"stages": [3, 5, 6], "schedule": "interleaved", "chunks": 2, "microbatches": 4}
    with launched("thread", model, BATCHES, **options) as pipeline:
        for stage in range(STAGES):
            for phase in ("forward", "backward"):
                (tmp_path / f"stage{stage}.{phase}").touch()
                with pytest.raises(Boom, match=f"{phase} of micro-batch {FAILS_AT}"):
                    pipeline.step()
                step = pipeline.current_step()
                assert pipeline.step().loss == plain.step(BATCHES[step])
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class WeightTrap(Trap):
    """A linear layer that springs where the gradient of its weight arrives."""

    def __init__(self, trigger: Path, how: str = "raise") -> None:
        super().__init__(trigger, how)
        self.seen["weights"] = 0
        self.inner = nn.Linear(D, D)
        self.inner.weight.register_hook(lambda gradient: self.spring("weights"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def model_with_weight_traps(folder: Path, how: str = "raise") -> pp.Model:
    """Six layers: a trap for the gradients of activations before each one for those of weights."""
    traps = [pp.Layer(trap, folder / f"stage{s}", how) for s in range(STAGES) for trap in (Trap, WeightTrap)]
    return pp.Model([pp.Layer(nn.Linear, D, D), *traps, pp.Layer(nn.Dropout, 0.3)], squared_error, adam)


SPLIT: dict[str, dict[str, Any]] = {
    "zb_h1": {"stages": [3, 5], "schedule": "zb_h1", "microbatches": 4},
    "zbv": {"stages": [1, 3, 5], "schedule": "zbv", "microbatches": 4},
    "dualpipev": {"stages": [1, 3, 5], "schedule": "dualpipev", "microbatches": 4},
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [*(("thread", name) for name in SPLIT), pytest.param("process", "zbv", marks=pytest.mark.slow)],
)
def test_both_parts_of_a_backward_may_fail(mode: str, name: str, tmp_path: Path, no_leaks: None) -> None:
    """Forget what the other stages have deferred, or it would be added to the next step's gradients."""
    model = model_with_weight_traps(tmp_path)
    plain = PlainLoop(model, 4)
    with launched(mode, model, BATCHES, **SPLIT[name]) as pipeline:
        for step, (stage, phase) in enumerate((s, p) for s in range(STAGES) for p in ("backward", "weights")):
            (tmp_path / f"stage{stage}.{phase}").touch()
            with pytest.raises(Boom) as caught:
                pipeline.step()
            assert caught.value.where == f"stage{stage}.{phase}"
            assert f"of micro-batch {FAILS_AT}, stage" in str(caught.value)
            if phase == "weights" and name != "dualpipev":
                assert "backward for weights of micro-batch" in str(caught.value)
            assert_same_state(pipeline.state_dict(), plain.state_dict())
            assert pipeline.evaluate(BATCHES[:1]).loss == plain.evaluate(BATCHES[0])
            assert pipeline.step().loss == plain.step(BATCHES[step])
            assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_a_stop_while_weights_are_pending_ends_the_program(tmp_path: Path, no_leaks: None) -> None:
    reached = threading.Event()

    def stay(where: str) -> None:
        reached.set()
        lp.wait_for_stop()

    ACTIONS["stay"] = stay
    program = lp.Program("stopped")
    handle = pp.add_pipeline(program, model_with_weight_traps(tmp_path, "stay"), **SPLIT["zbv"])
    (tmp_path / "stage1.weights").touch()
    run = lp.launch(program, "thread")
    step = run.client(handle)
    caller = threading.Thread(target=_train_quietly, args=(step,))
    caller.start()
    assert reached.wait(WITHIN_S)
    run.stop()
    run.wait(WITHIN_S)
    caller.join(WITHIN_S)
    assert not caller.is_alive()


def _train_quietly(pipeline: pp.PipelineClient) -> None:
    with contextlib.suppress(lp.Unavailable):  # unless the step ended within the grace
        pipeline.step(BATCHES[0])


def test_a_loss_that_raises_is_the_last_stages_failure(tmp_path: Path, no_leaks: None) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if target.shape[0] == 1:
            raise Boom("loss")
        return squared_error(output, target)

    model = pp.Model([nn.Linear(D, D) for _ in range(STAGES)], loss, adam)
    plain = PlainLoop(model, 4)
    with launched("thread", model, stages=STAGES, microbatches=4) as pipeline:
        with pytest.raises(Boom, match=r"micro-batch 3, stage 2"):
            pipeline.step(random_batches([10])[0])  # 3, 3, 3 and 1
        assert pipeline.step(BATCHES[0]).loss == plain.step(BATCHES[0])
        with pytest.raises(Boom):  # by then the first stage has done its part
            pipeline.evaluate([*BATCHES[:2], random_batches([1])[0]])
        assert pipeline.step(BATCHES[1]).loss == plain.step(BATCHES[1])


class FailsOnce(torch.optim.SGD):
    """An optimizer whose first step raises."""

    failures = 1

    def step(self, closure: Any = None) -> Any:
        if self.failures:
            self.failures -= 1
            raise Boom("optimizer")
        return super().step(closure)


def test_an_optimizer_that_raises_leaves_no_gradients_behind(no_leaks: None) -> None:
    """Regression: they were added to those of the next step."""
    optimizers: list[Any] = []

    def optimizer(parameters: Sequence[Any]) -> torch.optim.Optimizer:
        optimizers.append(FailsOnce([p for _, p in parameters], lr=0.1))
        made: torch.optim.Optimizer = optimizers[-1]
        return made

    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, optimizer)
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        with pytest.raises(Boom, match="optimizer"):
            pipeline.step(BATCHES[0])
        assert pipeline.current_step() == 0
        result = pipeline.step(BATCHES[0])
        trained = pipeline.state_dict()
    FailsOnce.failures = 0
    plain = PlainLoop(model, 2)
    try:
        assert plain.step(BATCHES[0]) == result.loss
        assert_same_state(trained, plain.state_dict())
    finally:
        FailsOnce.failures = 1


def _train(pipeline: pp.PipelineClient) -> None:
    for _ in pipeline.steps():
        pass


def test_a_stage_that_is_killed_with_weights_pending_is_named(tmp_path: Path, no_leaks: None) -> None:
    program = lp.Program("killed")
    pipeline = pp.add_pipeline(program, model_with_weight_traps(tmp_path, "kill"), **SPLIT["zb_h1"])
    program.add_node(lp.PyNode(lambda client: client.step(BATCHES[0]), pipeline), label="trainer")
    (tmp_path / "stage1.weights").touch()
    with pytest.raises(lp.NodeError, match="SIGKILL") as caught:
        lp.launch(program, "process").wait(60)
    assert (caught.value.label, caught.value.index) == ("stages", 1)


@pytest.mark.parametrize(
    ("stage", "phase"),
    [
        (1, "backward"),
        *(pytest.param(stage, "forward", marks=pytest.mark.slow) for stage in (0, 1, 2)),
    ],
)
def test_a_killed_stage_is_named_and_everything_ends(stage: int, phase: str, tmp_path: Path, no_leaks: None) -> None:
    program = lp.Program("killed")
    feeder = program.add_node(lp.CourierNode(Feeder, BATCHES), label="feeder")
    pipeline = pp.add_pipeline(program, model_with_traps(tmp_path, "kill"), inputs=feeder, **OPTIONS)
    program.add_node(lp.PyNode(_train, pipeline), label="trainer")
    (tmp_path / f"stage{stage}.{phase}").touch()
    run = lp.launch(program, "process")
    with pytest.raises(lp.NodeError, match="SIGKILL") as caught:
        run.wait(60)
    ended = time.time()
    assert (caught.value.label, caught.value.index) == ("stages", stage)
    died = tmp_path.stat().st_mtime  # when the trap removed its trigger
    assert ended - died < 10
