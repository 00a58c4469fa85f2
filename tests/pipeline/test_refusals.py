"""Inputs that a pipeline refuses: the error names them, and the pipeline goes on."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe import torch_version
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

pytestmark = pytest.mark.usefixtures("no_leaks")

WITHIN_S = 20.0
BATCHES = random_batches([6, 6, 6, 6])
LINEAR = pp.Layer(nn.Linear, D, D)


def refuses(kind: type[Exception], match: str, **options: Any) -> None:
    layers = [nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)]
    program = lp.Program("refused")
    with pytest.raises(kind, match=match):
        pp.add_pipeline(program, pp.Model(layers, squared_error, sgd), **options)
    assert not program.get_all_nodes()


def test_a_torch_that_is_too_old_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was an AttributeError in the first step, from inside of a stage."""
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    refuses(
        pp.PipelineError,
        r"torch 2\.8\.0\+cu128 .*need torch>=2\.\d+,<2\.\d+: pip install --upgrade 'torch>=2",
    )


def test_the_torch_that_pipelines_need_is_what_the_package_asks_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert torch_version.WANTED in project["optional-dependencies"]["torch"]
    assert [torch_version.is_too_old(v) for v in ("2.8.0", "2.100.0", "2.11.0a0+nv26.2", "3.0.0", "not installed")] == [
        True,
        *[False] * 4,
    ]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), ("cpu", torch.device("cpu"))], ids=str)
def test_a_device_is_a_name_or_torchs_own(device: Any) -> None:
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, sgd)
    with launched("thread", model, BATCHES, stages=2, microbatches=2, device=device) as pipeline:
        assert len(list(pipeline.steps())) == len(BATCHES)


def test_what_cannot_be_built_is_refused_before_launch() -> None:
    refuses(pp.PipelineError, "cannot cut 3 layers into 4 stages: ask for 1 to 3", stages=4)
    # was "ask for 1 to 3 stages", to who had asked for 2
    refuses(pp.PipelineError, "3 layers into 4 stages, 2 for each of 2 workers: ask for stages=1 or", schedule="zbv")
    few = {"schedule": "interleaved", "chunks": 4}
    refuses(pp.PipelineError, "4 for each of 2 workers: ask for a schedule with fewer chunks, or split a layer", **few)
    refuses(pp.PipelineError, r"cut points \[0, 2\] must increase and lie between 1 and 2", stages=[0, 2])
    refuses(pp.PipelineError, r"cut points \[2, 1\]", stages=(2, 1))
    refuses(pp.PipelineError, "cut points", stages=[3])
    refuses(
        pp.PipelineError,
        "make 1 pieces, but every worker of .* runs 2: give .* multiple of 2",
        stages=[],
        schedule="interleaved",
    )
    for clip in (True, 0, -1.0, torch.tensor([0.5]), "1"):
        refuses(pp.PipelineError, "clip_grad_norm=.* give a number above 0, or None", clip_grad_norm=clip)
    refuses(pp.ScheduleError, "'zbv' with chunks=3: .* use chunks=2", schedule="zbv", chunks=3)
    refuses(pp.ScheduleError, "use microbatches=4 or more", schedule="dualpipev", stages=2, microbatches=3)
    refuses(pp.PipelineError, "runs 2: give .* multiple of 2", stages=[1, 2], schedule="dualpipev")
    refuses(pp.ScheduleError, "no schedule '1fb1': did you mean '1f1b'", schedule="1fb1")
    refuses(pp.ScheduleError, "stages=0", stages=0)
    refuses(pp.ScheduleError, "stages=-1: give a whole number", stages=-1)
    refuses(pp.PipelineError, "inputs=3: give the handle of a feeder", inputs=3)
    refuses(pp.PipelineError, "microbatches=0", microbatches=0)
    refuses(pp.PipelineError, r"microbatches=4.0: give a whole number \(int\)", microbatches=4.0)
    refuses(pp.PipelineError, r"stages='2': give a whole number \(int\), a list", stages="2")
    refuses(pp.PipelineError, r"stages=2.0: give a whole number \(int\), a list", stages=2.0)
    refuses(pp.PipelineError, r"cut points \[1.0\] must be whole numbers \(int\)", stages=[1.0])
    refuses(pp.PipelineError, "replicas=1.5: give a whole number", replicas=1.5)
    refuses(pp.PipelineError, "replicas=None: give a whole number", replicas=None)
    refuses(pp.PipelineError, "schedule=5: give a name", schedule=5)
    refuses(pp.PipelineError, "channel='pigeon': .*auto", channel="pigeon")
    refuses(pp.PipelineError, "device=None: None must be 'auto', 'cpu'", device=None)
    with pytest.raises(TypeError, match=r"takes an lp\.Program first, not Model"):
        pp.add_pipeline(pp.Model([nn.ReLU()], squared_error, sgd), lp.Program("wrong"))  # type: ignore[arg-type]
    with pytest.raises(pp.PipelineError, match=r"takes a pp\.Model"):
        pp.add_pipeline(lp.Program("wrong"), nn.Linear(1, 1))  # type: ignore[arg-type]


def test_options_that_contradict_a_schedule_that_is_written_down_are_refused_before_launch() -> None:
    """Regression: they were ignored, or failed the first step."""
    written = pp.make_schedule("1f1b", stages=2, microbatches=4)
    refuses(pp.ScheduleError, "microbatches=8: .* use microbatches=4", schedule=written)
    refuses(pp.ScheduleError, "microbatches=2: .* use microbatches=4", schedule=written, microbatches=2)
    refuses(pp.ScheduleError, "stages=3: .* use stages=2", schedule=written, microbatches=4, stages=3)
    refuses(pp.ScheduleError, "chunks=2: .* leave them out", schedule=written, microbatches=4, chunks=2)
    larger = pp.make_schedule("1f1b", stages=3, microbatches=4)
    refuses(pp.ScheduleError, "stages=2: .* use stages=3", schedule=larger, microbatches=4, stages=2)
    refuses(pp.PipelineError, "microbatches=True", microbatches=True)


def test_a_file_that_is_no_schedule_is_named(tmp_path: Path) -> None:
    (tmp_path / "lower.csv").write_text("0f0,0b0\n")
    (tmp_path / "picture.csv").write_bytes(bytes([0x89, 0xFF]))
    refuses(pp.ScheduleError, "lower.csv: line 1, cell 1: '0f0' is not an action", schedule=tmp_path / "lower.csv")
    refuses(pp.ScheduleError, "cannot read .*picture.csv: 'utf-8'", schedule=str(tmp_path / "picture.csv"))
    refuses(pp.ScheduleError, "cannot read .*none.csv: No such file", schedule=tmp_path / "none.csv")
    refuses(pp.ScheduleError, "no schedule '", schedule=str(tmp_path))


def test_lbfgs_is_refused_with_a_reason() -> None:
    program = lp.Program("lbfgs")
    model = pp.Model([nn.Linear(1, 1)], squared_error, lambda p: torch.optim.LBFGS([parameter for _, parameter in p]))
    pp.add_pipeline(program, model, stages=1)
    with pytest.raises(lp.NodeError, match="LBFGS needs a closure, to evaluate the loss") as caught:
        lp.launch(program, "thread").wait(WITHIN_S)
    assert (caught.value.label, caught.value.type_name) == ("stages", "PipelineError")


class Says:
    """A feeder that returns what it was given."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def batch(self, step: int) -> Any:
        return self._batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (7, r"feeder's batch\(0\), takes a pair \(input, target\), not int"),
        ((1, 2, 3), "not tuple of 3"),
        (
            (None, torch.ones(2)),
            "at least one tensor with a batch dimension, not NoneType: .* give the input as the target",
        ),
        ((torch.ones(4, T, D), torch.ones(4)[0]), "at least one tensor with a batch dimension"),
        ((np.ones((4, T, D)), torch.ones(4)), r"ndarray of shape \(4, 3, 8\), .* give tensors, as torch.from_numpy"),
    ],
)
def test_a_feeder_that_returns_nonsense_is_told_so(batch: Any, message: str) -> None:
    model = model_with_everything()
    with launched("thread", model, lambda: Says(batch)) as pipeline, pytest.raises(pp.PipelineError, match=message):
        pipeline.step()


def test_a_feeder_that_fails_is_the_steps_failure_and_the_next_one_goes_on() -> None:
    class Fails:
        def __init__(self) -> None:
            self.failures = 1

        def batch(self, step: int) -> Any:
            if step == 1 and self.failures:
                self.failures -= 1
                raise OSError("the disk is gone")
            return BATCHES[step] if step < 4 else None

    model = model_with_everything()
    plain = PlainLoop(model, 3)
    with launched("thread", model, Fails, stages=1, microbatches=3) as pipeline:
        pipeline.step()
        with pytest.raises(OSError, match="the disk is gone"):
            pipeline.step()
        list(pipeline.steps())
        plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("target_size", [2, 7, 9])
@pytest.mark.parametrize("source", ["feeder", "client"])
def test_a_target_that_is_cut_at_other_samples_is_refused(source: str, target_size: int) -> None:
    """12 in 5 are 3, 3, 3 and 3; 7 are 2, 2, 2 and 1: that many, too, and a loss may broadcast."""
    batch = (torch.randn(12, T, D), torch.randn(target_size, T, D))
    model = pp.Model([LINEAR, LINEAR], lambda output, target: output.mean(), sgd)
    with launched("thread", model, [batch] if source == "feeder" else None, stages=2, microbatches=5) as pipeline:
        call = pipeline.step if source == "feeder" else lambda: pipeline.step(batch)
        with pytest.raises(pp.PipelineError, match=rf"12 and {target_size} samples") as got:
            call()
        assert f"in the {'feeder' if source == 'feeder' else 'batch of step 0'}" in str(got.value)
        assert pipeline.current_step() == 0


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, target: output, r"scalar tensor, .* not one of shape \[4, 3, 8\]"),
        (lambda output, target: output.mean() * 1j, r"a real scalar tensor, .* of shape \[\] and torch.complex64"),
        (lambda output, target: 1.0, "not float"),
        (lambda output, target: None, "not NoneType"),
        (lambda output, target: (output.mean(), {}, 1), "not tuple"),
        (lambda output, target: (output.mean(), 0.5), "metrics must be a dict of numbers, not float"),
        (lambda output, target: (output.mean(), {"name": None}), "metric 'name' .* None of type NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss: Any, message: str) -> None:
    model = pp.Model([LINEAR, LINEAR], loss, sgd)
    batch = random_batches([4])[0]
    with launched("thread", model, microbatches=1) as pipeline, pytest.raises(pp.PipelineError, match=message):
        pipeline.step(batch)


@pytest.mark.parametrize(
    ("weight", "message"), [(lambda target: None, "not None"), (lambda target: target, r"tensor of shape \[4, 3, 8\]")]
)
def test_a_weight_that_is_no_number_is_refused(weight: Any, message: str) -> None:
    model = pp.Model([LINEAR, LINEAR], squared_error, sgd, loss_weight=weight)
    batch, expected = random_batches([4])[0], f"loss_weight must give a number .* {message}"
    with launched("thread", model, microbatches=1) as pipeline, pytest.raises(pp.PipelineError, match=expected):
        pipeline.step(batch)


NO_SCHEDULE: Any = "1f1b"
COSTS = pp.Costs(forward=1, backward_input=1, backward_weight=1)
TOPOLOGY = pp.Topology(levels=[pp.Level("device", count=2, bandwidth=1e9)])
PROFILE = pp.Profile((pp.LayerProfile("only", forward_s=1, backward_s=1, activation_bytes=1, parameter_bytes=1),))
NOTHING: Any = None


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: pp.verify(NO_SCHEDULE), "schedule='1f1b': give a pp.Schedule, such as pp.make_schedule"),
        (lambda: pp.simulate(NO_SCHEDULE, COSTS), "schedule='1f1b': give a pp.Schedule"),
        (lambda: pp.simulate(pp.make_schedule("gpipe", 2, 2), NOTHING), "costs=None: give pp.Costs"),
        (lambda: pp.make_schedule(NOTHING, 2, 2), "no schedule None"),
        (lambda: pp.make_schedule([], 2, 2), r"no schedule \[\]"),  # type: ignore[arg-type]
        (lambda: pp.partition(NOTHING, TOPOLOGY), "profile=None: give a pp.Profile"),
        (lambda: pp.partition(PROFILE, NOTHING), "topology=None: give a pp.Topology"),
        (
            lambda: pp.check(NOTHING, BATCHES),
            r"check\(\) takes a pp.Model\(layers, loss, optimizer\) first, not NoneType",
        ),
    ],
    ids=["verify", "simulate", "costs", "name", "no name", "profile", "topology", "check"],
)
def test_what_is_something_else_than_asked_for_is_named(ask: Callable[[], Any], message: str) -> None:
    # Mostly an AttributeError of whatever was looked at first: 'str' object has no attribute 'placement'.
    with pytest.raises((pp.PipelineError, pp.ScheduleError, pp.PartitionError), match=message):
        ask()


def test_options_of_the_wrong_kind_are_named() -> None:
    refuses(pp.PipelineError, r"channel=\[\]", channel=[])
    refuses(pp.PipelineError, r"schedule=\[\]: give a name such as", schedule=[])
    refuses(ValueError, "max_restarts .*got '2'", max_restarts="2")
    with pytest.raises(pp.PipelineError, match="tied=3: give pairs of parameter names"):
        pp.Model([LINEAR, LINEAR], squared_error, sgd, tied=3)  # type: ignore[arg-type]


def test_pairs_of_tied_parameters_may_come_from_a_generator() -> None:
    # It was read to its end by the check, and nothing was tied.
    pairs = (pair for pair in [("0.weight", "1.weight")])
    assert pp.Model([LINEAR, LINEAR], squared_error, sgd, tied=pairs).tied == (("0.weight", "1.weight"),)  # type: ignore[arg-type]


def test_what_a_client_asks_wrongly_is_refused_and_the_next_step_goes_on() -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 2)
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        with pytest.raises(pp.PipelineError, match=r"needs a feeder: add_pipeline\(\.\.\., inputs=feeder_handle\)"):
            pipeline.step()
        with pytest.raises(pp.PipelineError, match="needs a feeder"):
            pipeline.trace(1)
        with pytest.raises(pp.PipelineError, match=r"step\(\) takes a pair"):
            pipeline.step(BATCHES[0][0])  # type: ignore[arg-type]
        with pytest.raises(pp.PipelineError, match="at least one"):
            pipeline.evaluate([])
        with pytest.raises(pp.PipelineError, match=r"each batch .* takes a pair .* not Tensor"):
            pipeline.evaluate([BATCHES[0][0]])  # type: ignore[list-item]
        with pytest.raises(pp.PipelineError, match=r"NoneType holds no tensor with a batch dimension: .* the input as"):
            pipeline.evaluate([(BATCHES[0][0], None)])
        assert pipeline.step(BATCHES[0]).loss == plain.step(BATCHES[0])
