"""A step that fails leaves parameters and buffers as they were, or says that it could not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import D, PlainLoop, T, assert_same_state, launched, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([8, 8, 8])


class FailsOn(nn.Module):
    """Raises in forward or backward where the input holds a number that is not one."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return x


class Counts(nn.Module):
    """Puts another tensor in the buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_buffers_are_as_before(recompute: str) -> None:
    layers = [nn.Linear(D, D), nn.BatchNorm1d(T), Counts(), nn.Linear(D, D), nn.BatchNorm1d(T), FailsOn()]
    model = pp.Model(layers, squared_error, sgd)
    plain = PlainLoop(model, 4)
    bad = (BATCHES[1][0].clone(), BATCHES[1][1])
    bad[0][5] = float("nan")  # in the third micro-batch
    with launched("thread", model, stages=[3], microbatches=4, recompute=recompute) as pipeline:
        for batch in BATCHES[:2]:
            before = pipeline.state_dict()
            with pytest.raises(ValueError, match="not a number"):
                pipeline.step(bad)
            assert_same_state(pipeline.state_dict(), before)
            assert pipeline.step(batch).loss == plain.step(batch)
        pipeline.evaluate(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def _whole(*stages: str) -> pp.Schedule:
    return pp.Schedule.from_csv("\n".join(",".join(f"{s}{op}{m}" for op in "FB" for m in range(4)) for s in stages))


def test_a_step_that_does_not_begin_leaves_the_one_before_it_alone() -> None:
    # Its BatchNorm statistics were put back to what they were before that one.
    model = pp.Model([nn.BatchNorm1d(T), nn.Linear(D, D), Counts()], squared_error, sgd)
    plain = PlainLoop(model, 4)
    with launched("thread", model, stages=2, schedule=_whole("0", "1"), microbatches=4) as pipeline:
        for batch in BATCHES:
            assert pipeline.step(batch).loss == plain.step(batch)
            with pytest.raises(pp.ScheduleError, match="written for 4 micro-batches"):
                pipeline.step(random_batches([3])[0])
            assert_same_state(pipeline.state_dict(), plain.state_dict())


class _NeverSecond(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        if self.last_epoch == 2:
            raise RuntimeError("no rate for step 2")
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_skipped_step_that_fails_leaves_the_one_before_it_alone() -> None:
    model = pp.Model([nn.BatchNorm1d(T), nn.Linear(D, D)], squared_error, sgd, lr_scheduler=_NeverSecond)
    plain = PlainLoop(model, 4)
    with launched("thread", model, stages=1, microbatches=4) as pipeline:
        assert pipeline.step(BATCHES[0]).loss == plain.step(BATCHES[0])
        with pytest.raises(RuntimeError, match="no rate"):
            pipeline.skip_step()
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class _Odd(Exception):
    """An exception whose notes and message are not what Python expects."""

    def __init__(self) -> None:
        super().__init__()
        self.__notes__: Any = 5

    def __str__(self) -> str:
        raise KeyboardInterrupt("not now")


class _Lazy(Exception):
    """Has the attributes of what it was made of, and says KeyError for others, `__notes__` among them."""

    def __init__(self, **found: Any) -> None:
        super().__init__("lazy")
        self.found = found

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["found"][name]


class _RaisesOdd(nn.Module):
    def __init__(self, odd: Any = _Odd) -> None:
        super().__init__()
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise self.odd()
        return x


@pytest.mark.parametrize("stages", [[], [1]], ids=["one stage", "two stages"])
def test_an_exception_whose_attributes_raise_fails_the_step_and_nothing_else(stages: list[int]) -> None:
    # Of one stage the gradients stayed, and the next step added its own to them; the second of two hung.
    model = pp.Model([nn.Linear(D, D), _RaisesOdd(_Lazy)], squared_error, sgd)
    plain = PlainLoop(model, 2)
    bad = BATCHES[0][0].clone(), BATCHES[0][1]
    bad[0][-1] = float("nan")
    with launched("thread", model, stages=stages or 1, microbatches=2) as pipeline:
        with pytest.raises(_Lazy, match=rf"in layer 1\._RaisesOdd\nin stages/{len(stages)}, forward of micro-batch 1"):
            pipeline.step(bad)
        assert pipeline.step(BATCHES[0]).loss == plain.step(BATCHES[0])
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("stage", [0, 1])
def test_an_exception_that_takes_no_notes_and_has_no_message_reaches_the_caller(stage: int) -> None:
    """Regression: the caller got a TypeError about its notes, and its message ended the thread that answers."""
    layers = [nn.Linear(D, D), nn.Linear(D, D)]
    layers.insert(2 * stage, _RaisesOdd())
    bad = torch.full_like(BATCHES[0][0], float("nan")), BATCHES[0][1]
    model = pp.Model(layers, squared_error, sgd)
    plain = PlainLoop(model, 2)
    with launched("thread", model, stages=[1 + (stage == 0)], microbatches=2) as pipeline:
        with pytest.raises(_Odd):
            pipeline.step(bad)
        assert pipeline.step(BATCHES[0]).loss == plain.step(BATCHES[0])


class _RaisesOnce(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        if self.last_epoch == 2 and any(
            p.numel() == D for group in self.optimizer.param_groups for p in group["params"]
        ):
            raise RuntimeError("no rate for step 2")
        return [group["lr"] for group in self.optimizer.param_groups]


def test_an_update_that_fails_halfway_is_mended_by_a_checkpoint_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler of the stage with biases fails; the other stage has done its update."""
    model = pp.Model([nn.Linear(D, D, bias=False), nn.Linear(D, D)], squared_error, sgd, lr_scheduler=_RaisesOnce)
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        pipeline.step(BATCHES[0])
        pipeline.save(tmp_path)
        before = pipeline.state_dict()
        with pytest.raises(RuntimeError, match="no rate") as caught:
            pipeline.step(BATCHES[1])
        assert "in stages/1, update of stages 1" in str(caught.value)
        for refused in (lambda: pipeline.save(tmp_path / "torn"), lambda: pipeline.step(BATCHES[1])):
            with pytest.raises(
                pp.PipelineError, match=r"an update has failed .*: step 1: .*no rate.*load\(\) a checkpoint"
            ):
                refused()
        caplog.clear()
        assert not torch.equal(pipeline.state_dict()["0.weight"], before["0.weight"]), "the weights are not lost"
        assert pipeline.evaluate(BATCHES).loss > 0
        assert (
            "stages/0 has done the update" in caplog.text and "stages/1 has done the update, and failed" in caplog.text
        )
        pipeline.load(tmp_path)
        assert_same_state(pipeline.state_dict(), before)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_scheduler_that_fails_on_all_stages_alike_leaves_them_at_one_step(tmp_path: Path, microbatches: int) -> None:
    """OneCycleLR has an end. After it nothing could be read or saved, and the weights were lost."""
    layers = [nn.Linear(D, D, bias=False), nn.Tanh(), nn.Linear(D, D, bias=False)]

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)

    model = pp.Model(layers, squared_error, sgd, lr_scheduler=scheduler, tied=[("0.weight", "2.weight")])
    with launched("thread", model, stages=2, microbatches=microbatches) as pipeline:
        for batch in BATCHES[:2]:
            pipeline.step(batch)
        with pytest.raises(ValueError, match=r"total.*steps is 2"):
            pipeline.step(BATCHES[2])
        assert pipeline.current_step() == 3
        state = pipeline.state_dict()
        assert torch.equal(state["0.weight"], state["2.weight"]), "the update came to the tied stage, too"
        pipeline.save(tmp_path)
        fingerprint = pipeline.fingerprint()
    with launched("thread", model, stages=1) as pipeline:
        pipeline.load(tmp_path)
        assert (pipeline.current_step(), pipeline.fingerprint()) == (3, fingerprint)


class _LoadsOnce(nn.Linear):
    """A layer without room for its weights a second time."""

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        if getattr(self, "is_loaded", False):
            raise MemoryError("no room")
        self.is_loaded = True
        return super().load_state_dict(*args, **options)


def test_weights_that_not_all_stages_could_take_are_not_trained_on(tmp_path: Path) -> None:
    # The first stage had the new weights, the second the old ones, and the next step trained both.
    model = pp.Model([nn.Linear(D, D), _LoadsOnce(D, D)], squared_error, sgd)
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        new = {name: value + 1 for name, value in pipeline.state_dict().items()}
        pipeline.load_state_dict(new)
        pipeline.step(BATCHES[0])
        with pytest.raises(pp.PipelineError, match="missing"):  # before anything has changed
            pipeline.load_state_dict({})
        assert pipeline.step(BATCHES[1]).step == 1
        with pytest.raises(MemoryError, match="no room"):
            pipeline.load_state_dict(new)
        with pytest.raises(pp.PipelineError, match=r"load_state_dict\(\) has failed .*MemoryError: no room.*load\(\)"):
            pipeline.step(BATCHES[2])


def test_tied_weights_that_did_not_reach_their_other_stage_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The step's update was made, but it did not count as a step: asked for again it was made twice.
    layers = [nn.Linear(D, D, bias=False), nn.Tanh(), nn.Linear(D, D, bias=False)]
    model = pp.Model(layers, squared_error, sgd, tied=[("0.weight", "2.weight")])
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        pipeline.step(BATCHES[0])
        undisturbed = pipeline.fingerprint()
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        pipeline.save(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr("lp_pipe.pipeline.worker.side_channels.SideChannels.share_weights", _no_room)
            with pytest.raises(MemoryError, match="no room"):
                pipeline.step(BATCHES[0])
        with pytest.raises(pp.PipelineError, match=r"failed after the update, at the tied weights: MemoryError.*load"):
            pipeline.step(BATCHES[0])
        pipeline.load(tmp_path)
        pipeline.step(BATCHES[0])
        assert pipeline.fingerprint() == undisturbed


@pytest.mark.parametrize("what", ["steps.total_norm", "steps.summed", "on_nan.OnNan.why_skipped"])
def test_what_fails_between_backwards_and_update_leaves_no_gradients_behind(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The next step added its own to them.
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, sgd)
    plain = PlainLoop(model, 2, clip_grad_norm=0.1)
    with launched("thread", model, stages=2, microbatches=2, clip_grad_norm=0.1) as pipeline:
        with monkeypatch.context() as patched:
            patched.setattr(f"lp_pipe.pipeline.conductor.{what}", _no_room)
            with pytest.raises(MemoryError, match="no room"):
                pipeline.step(BATCHES[0])
        pipeline.step(BATCHES[0])
        plain.step(BATCHES[0])
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def _no_room(*args: Any, **options: Any) -> Any:
    raise MemoryError("no room")


class _Leaves(torch.optim.SGD):
    """Ends in its second step as no program should; `leaves` is what it raises."""

    leaves: type[BaseException] | None = None
    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1
        if self.leaves is not None and self.steps == 2:
            raise self.leaves


@pytest.mark.parametrize("leaves", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_update_that_ends_in_an_exit_has_failed_as_well(
    leaves: type[BaseException], schedule: str, tmp_path: Path
) -> None:
    """Regression: on the conducting stage it went unnoticed, and the next step began with half an update."""

    def optimizer(named: Any) -> _Leaves:
        made = _Leaves([parameter for _, parameter in named], lr=0.1)
        made.leaves = leaves if any(name.startswith("0.") for name, _ in named) else None
        return made

    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, optimizer)
    with launched("thread", model, stages=2, microbatches=1, schedule=schedule) as pipeline:
        pipeline.step(BATCHES[0])
        pipeline.save(tmp_path)
        before = pipeline.state_dict()
        with pytest.raises(lp.RemoteError, match=leaves.__name__) as caught:
            pipeline.step(BATCHES[1])
        assert "in stages/0, update of stages 0, step 1" in str(caught.value)
        with pytest.raises(pp.PipelineError, match=rf"an update has failed .*: step 1: {leaves.__name__}"):
            pipeline.step(BATCHES[1])
        pipeline.load(tmp_path)
        assert_same_state(pipeline.state_dict(), before)
        assert pipeline.step(BATCHES[1]).step == 1


class NeedsAClosure(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


def test_any_optimizer_that_needs_a_closure_is_refused_and_its_node_named() -> None:
    program = lp.Program("closure")
    pp.add_pipeline(program, pp.Model([nn.Linear(D, D)], squared_error, NeedsAClosure), stages=1)
    with pytest.raises(lp.NodeError, match="NeedsAClosure needs a closure, to evaluate the loss") as caught:
        lp.launch(program, "thread").wait(20)
    assert caught.value.label == "stages"


class LeavesOut(nn.Module):
    """Has a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(D))
        self.unused = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_leaves_parameters_without_gradients_alone(foreach: bool) -> None:
    """Groups of one parameter each have options of their own."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.1 / (1 + len(name))} for name, p in parameters]
        return torch.optim.AdamW(groups, foreach=foreach)

    model = pp.Model([nn.Linear(D, D), LeavesOut(), nn.Linear(D, D), LeavesOut()], squared_error, optimizer)
    plain = PlainLoop(model, 3, 1e-3)
    with launched("thread", model, stages=2, microbatches=3, clip_grad_norm=1e-3) as pipeline:
        assert [pipeline.step(batch).loss for batch in BATCHES] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
