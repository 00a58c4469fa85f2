"""A scheduler that waits for a metric, and the learning rates of the whole model, are a plain loop's on any cut."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.pipeline.protocol import GetLearningRates, StepScheduler
from lp_pipe.pipeline.worker.restart_check import RestartCheck
from lp_pipe.pipeline.worker.training import Training
from lp_pipe.pipeline.worker.worker_state import WorkerState
from tests.pipeline.delayed_gradients import DelayedLoop, buffered, stashed
from tests.pipeline.plain_loop import (
    D,
    Feeder,
    PlainLoop,
    adam,
    assert_same_state,
    halve_every_two_steps,
    launched,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    # torch's, when the very first step is skipped.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`"),
]

BATCHES = random_batches([8] * 6)
METRICS = [3.0, 2.0, 2.5, 2.5, 1.0, 4.0]  # with a patience of 0, the third, fourth and last one lower the rate


def one_group_a_layer(named: Any) -> torch.optim.Optimizer:
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in named:
        groups.setdefault(int(name.split(".")[0]), []).append(parameter)
    return torch.optim.AdamW([{"params": group, "lr": 0.01 * (1 + layer)} for layer, group in groups.items()])


def on_plateau(optimizer: torch.optim.Optimizer) -> schedulers.ReduceLROnPlateau:
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, cooldown=1)


def model_on_plateau(**options: Any) -> pp.Model:
    return model_with_everything(**{"optimizer": one_group_a_layer, "lr_scheduler": on_plateau, **options})


def trained(model: pp.Model, metrics: list[float] = METRICS, **options: Any) -> PlainLoop:
    """A plain loop, behind as many steps as there are metrics."""
    plain = PlainLoop(model, 4, **options)
    for batch, metric in zip(BATCHES, metrics, strict=False):
        plain.step(batch)
        plain.lr_scheduler.step(metric)
    return plain


def train(pipeline: pp.PipelineClient, metrics: list[float]) -> None:
    for metric in metrics:
        pipeline.step()
        pipeline.scheduler_step(metric)


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_scheduler_of_a_metric_is_stepped_where_the_loop_says(mode: str, stages: int) -> None:
    model = model_on_plateau(lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o, "max", 0.5, 0, min_lr=1e-3))
    plain = PlainLoop(model, 4)
    with launched(mode, model, BATCHES, stages=stages, microbatches=4) as pipeline:
        for batch, result in zip(BATCHES, pipeline.steps(), strict=True):
            assert result.loss == plain.step(batch)
            assert pipeline.learning_rates() == plain.learning_rates()
            if result.step != 2:  # not every step, as with an evaluation now and then
                loss = pipeline.evaluate([BATCHES[0]]).loss
                pipeline.scheduler_step(loss)
                plain.lr_scheduler.step(loss)
        assert [*pipeline.learning_rates().items()] == [*plain.learning_rates().items()]
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert plain.learning_rates() != PlainLoop(model, 4).learning_rates()


@pytest.mark.parametrize(
    ("options", "plain_options"),
    [
        ({"stages": [3], "replicas": [1, 2]}, {"replicas": [1, 1, 1, 2, 2, 2]}),
        ({"stages": 2, "schedule": "zbv", "clip_grad_norm": 0.1}, {"clip_grad_norm": 0.1}),
        ({"stages": 2, "precision": "fp16"}, {"precision": "fp16"}),
    ],
    ids=["replicas", "zbv", "fp16"],
)
def test_so_it_is_with(options: dict[str, Any], plain_options: dict[str, Any]) -> None:
    """fp16's first two scales are too large for these gradients: these steps are skipped, their metrics are not."""
    factor = 50.0 if "precision" in options else 1.0
    layers = [pp.Layer(nn.Linear, D, D) for _ in range(6)]
    model = model_on_plateau(layers=layers, loss=lambda output, target: squared_error(output, target) * factor)
    plain = trained(model, **plain_options)
    with launched("thread", model, BATCHES, microbatches=4, **options) as pipeline:
        train(pipeline, METRICS)
        assert pipeline.learning_rates() == plain.learning_rates()
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_tied_and_frozen_parameters_have_the_rate_of_a_plain_loop() -> None:
    """A tied one once; a frozen one has none, also where its stage has something to train."""
    layers = [nn.Linear(D, D).requires_grad_(False), *(nn.Linear(D, D) for _ in range(3))]
    layers[3].weight = layers[1].weight
    layers[2].bias.requires_grad_(False)
    model = pp.Model(layers, squared_error, one_group_a_layer, on_plateau)
    plain = trained(model)
    for stages in (1, 2, 4):
        with launched("thread", model, BATCHES, stages=stages, microbatches=4) as pipeline:
            train(pipeline, METRICS)
            assert pipeline.learning_rates() == plain.learning_rates()
            assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert list(plain.learning_rates()) == ["1.weight", "1.bias", "2.weight", "3.bias"]


def biases_apart(parameters: Any) -> torch.optim.Optimizer:
    biases = [parameter for _, parameter in parameters if parameter.ndim == 1]
    others = [parameter for _, parameter in parameters if parameter.ndim > 1]
    return torch.optim.SGD([{"params": biases, "lr": 0.2}, {"params": others}], lr=0.1)


def test_learning_rates_come_in_the_order_of_state_dict() -> None:
    """Regression: they came group by group within a layer."""
    model = model_on_plateau(layers=[nn.Linear(D, D), nn.Linear(D, D)], optimizer=biases_apart)
    with launched("thread", model, stages=2) as pipeline:
        assert list(pipeline.learning_rates().items()) == [
            ("0.weight", 0.1),
            ("0.bias", 0.2),
            ("1.weight", 0.1),
            ("1.bias", 0.2),
        ]


@pytest.mark.parametrize("how", ["save", "save_async", "mirror"])
def test_a_checkpoint_keeps_what_the_scheduler_knows(tmp_path: Path, how: str) -> None:
    model = model_on_plateau()
    plain = trained(model)
    with launched("thread", model, BATCHES, stages=3, microbatches=4) as pipeline:
        train(pipeline, METRICS[:3])
        if how == "save":
            pipeline.save(tmp_path)
        elif how == "save_async":
            pipeline.save_async(tmp_path).result(30.0)
        else:
            pipeline.mirror()
        train(pipeline, METRICS[3:5])
        if how == "mirror":
            pipeline.go_back(3)
            train(pipeline, METRICS[3:])
            assert_same_state(pipeline.state_dict(), plain.state_dict())
    for stages in (1, 3, 4) if how != "mirror" else ():
        with launched("thread", model, BATCHES, stages=stages, microbatches=4) as pipeline:
            pipeline.load(tmp_path)
            train(pipeline, METRICS[3:])
            assert pipeline.learning_rates() == plain.learning_rates()
            assert_same_state(pipeline.state_dict(), plain.state_dict())


class _Trains:
    """Lowers the rate by its losses; `last` is the step whose result ends the program, as a kill there would."""

    def __init__(self, pipeline: pp.PipelineClient, every: int, last: int) -> None:
        self._pipeline, self._every, self._last = pipeline, every, last
        self._losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = state["losses"]

    def run(self) -> None:
        checkpoints = Checkpoints({"pipeline": self._pipeline, "trainer": self})
        for result in checkpoints.steps(self._pipeline, len(BATCHES), save_every=self._every):
            if result.step == self._last:
                raise ArithmeticError("as if it were killed")
            self._losses.append(result.loss)
            self._pipeline.scheduler_step(result.loss)
        outcome = repr((self._losses, self._pipeline.learning_rates(), self._pipeline.fingerprint()))
        (Path(lp.context().run_dir) / "outcome").write_text(outcome)
        lp.stop()


def outcome_of(run_dir: Path, schedule: str, every: int, lasts: Sequence[int]) -> str:
    model = pp.Model(
        [pp.Layer(nn.Linear, D, D) for _ in range(3)],
        squared_error,
        sgd,
        lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, "max", 0.5, 0),  # losses fall, so that it lowers
    )
    for last in (*lasts, -1):
        program = lp.Program("resumed")
        feeder = program.add_node(lp.CourierNode(Feeder, BATCHES), label="feeder")
        pipeline = pp.add_pipeline(program, model, stages=2, schedule=schedule, microbatches=2, inputs=feeder)
        program.add_node(lp.PyClassNode(_Trains, pipeline, every, last), label="trainer")
        with contextlib.suppress(lp.NodeError):
            lp.launch(program, run_dir=run_dir).wait(60.0)
    return (run_dir / "outcome").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "every", "lasts"),
    [
        ("pipedream", 2, [3]),
        ("pipedream", 1, [2, 5]),
        ("pipedream_2bw", 5, [5]),  # nothing is left to do but to have the result
        ("1f1b", 2, [3]),
    ],
)
def test_a_resumed_loop_steps_the_scheduler_as_often_as_one_that_was_not_ended(
    tmp_path: Path, schedule: str, every: int, lasts: list[int]
) -> None:
    # Of an asynchronous schedule the result that was due at the checkpoint was lost: the rates were other ones.
    undisturbed = outcome_of(tmp_path / "whole", schedule, every, [])
    assert outcome_of(tmp_path / "resumed", schedule, every, lasts) == undisturbed


def test_a_step_is_mirrored_before_and_after_a_metric_as_two_states() -> None:
    model = model_on_plateau()
    with launched("thread", model, BATCHES, stages=2, microbatches=4) as pipeline:
        train(pipeline, METRICS[:2])
        pipeline.mirror()
        before = pipeline.learning_rates()
        pipeline.scheduler_step(9.0)
        pipeline.go_back(2)
        assert pipeline.learning_rates() == before
        pipeline.scheduler_step(9.0)
        after = pipeline.learning_rates()
        pipeline.mirror()
        pipeline.step()
        pipeline.go_back(2)
        assert pipeline.learning_rates() == after != before


@pytest.mark.parametrize(("schedule", "rules"), [("pipedream", stashed(3)), ("pipedream_2bw", buffered(3))])
def test_an_asynchronous_pipeline_is_stepped_behind_the_step_that_is_on_its_way(schedule: str, rules: Any) -> None:
    model, cuts = model_on_plateau(loss=squared_error), [3, 5]
    loop = DelayedLoop(model, cuts, 4, rules)
    with launched("thread", model, BATCHES, stages=cuts, schedule=schedule, microbatches=4) as pipeline:
        done = 0
        for _, metric in zip(pipeline.steps(), METRICS, strict=True):
            pipeline.scheduler_step(metric)
            for batch in BATCHES[done : pipeline.current_step()]:
                loop.step(batch)
            done = pipeline.current_step()
            for scheduler in loop.schedulers:
                scheduler.step(metric)
        assert_same_state(pipeline.state_dict(), loop.state_dict())


def test_steps_that_are_left_out_are_no_business_of_such_a_scheduler() -> None:
    with launched("thread", model_on_plateau(), BATCHES, stages=2, microbatches=4) as pipeline:
        rates = pipeline.learning_rates()
        pipeline.skip_step()
        assert pipeline.learning_rates() == rates


def test_the_rate_is_that_of_the_next_step_whatever_the_scheduler() -> None:
    model = model_with_everything(optimizer=sgd)
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, stages=3, microbatches=4) as pipeline:
        for batch in BATCHES:
            assert pipeline.learning_rates() == plain.learning_rates()
            pipeline.step()
            plain.step(batch)


def rates_by_name(named: Any) -> torch.optim.Optimizer:
    """Two groups, of which one or both are empty on some stages."""
    biases = {"params": [parameter for name, parameter in named if name.endswith("bias")], "lr": 0.01, "momentum": 0.8}
    others = {"params": [parameter for name, parameter in named if not name.endswith("bias")]}
    return torch.optim.SGD([others, biases], lr=0.05, momentum=0.9)


SCHEDULERS: dict[str, Any] = {
    "one cycle": lambda o: schedulers.OneCycleLR(o, [0.1, 0.3], total_steps=9),
    "lambdas": lambda o: schedulers.LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 0.5**step]),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2, max_momentum=0.95),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 5)], [2]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_groups_have_their_rates_where_stages_have_no_parameters_or_one_group(scheduler: str, precision: str) -> None:
    """With fp16 the first two steps are skipped, and count for the scheduler."""
    factor = 50.0 if precision == "fp16" else 1.0
    model = pp.Model(
        [
            pp.Layer(nn.Linear, D, D, bias=False),
            pp.Layer(nn.Tanh),
            pp.Layer(nn.Linear, D, D),
            pp.Layer(nn.Linear, D, D),
        ],
        lambda output, target: squared_error(output, target) * factor,
        rates_by_name,
        SCHEDULERS[scheduler],
    )
    plain = PlainLoop(model, 4, precision=precision)
    with launched("thread", model, BATCHES, stages=4, microbatches=4, precision=precision) as pipeline:
        for batch, result in zip(BATCHES, pipeline.steps(), strict=True):
            assert result.loss == plain.step(batch)
            assert pipeline.learning_rates() == plain.learning_rates()
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class NoRate(torch.optim.SGD):
    """An optimizer that knows no such thing."""

    def __init__(self, named: Any) -> None:
        super().__init__(named)
        for group in self.param_groups:
            del group["lr"]


def test_only_groups_that_have_a_rate_are_in_it_and_a_tensor_is_a_number() -> None:
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Tanh), pp.Layer(nn.Linear, D, D)]
    with launched("thread", pp.Model(layers, squared_error, NoRate), stages=3) as pipeline:
        assert pipeline.learning_rates() == {}
    rate = torch.tensor(0.5)
    model = pp.Model(layers, squared_error, lambda named: torch.optim.Adam(named, lr=rate))
    with launched("thread", model, stages=3) as pipeline:
        rates = pipeline.learning_rates()
        assert rates == {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 0.5, "2.bias": 0.5}
        assert all(type(value) is float for value in rates.values())


def test_what_has_no_use_for_a_metric_says_so_and_goes_on() -> None:
    def refuses(message: str, metric: Any = 1.0, **options: Any) -> None:
        with launched("thread", model_with_everything(**options), BATCHES, stages=2, microbatches=4) as pipeline:
            with pytest.raises(pp.PipelineError, match=message):
                pipeline.scheduler_step(metric)
            pipeline.step()

    refuses("no lr_scheduler.*ReduceLROnPlateau", lr_scheduler=None)
    refuses(r"scheduler \(StepLR\) .*metric", lr_scheduler=halve_every_two_steps)
    refuses(r"takes a number, such as evaluate\(batches\)\.loss, not EvalResult", pp.EvalResult(1.0, {}))
    refuses("takes a number, .* not NoneType", None, lr_scheduler=on_plateau)
    frozen = model_on_plateau(layers=[nn.Linear(D, D).requires_grad_(False)])
    with (
        launched("thread", frozen, stages=1) as pipeline,
        pytest.raises(pp.PipelineError, match=r"scheduler \(none"),
    ):
        pipeline.scheduler_step(1.0)


class Fussy(schedulers.ReduceLROnPlateau):
    def step(self, metrics: Any, epoch: Any = None) -> None:
        if metrics < 0:
            raise ValueError("a loss is not negative")
        super().step(metrics)


def test_a_scheduler_that_fails_leaves_nothing_to_go_on_with_but_a_checkpoint(tmp_path: Path) -> None:
    with launched("thread", model_on_plateau(lr_scheduler=Fussy), BATCHES, stages=2, microbatches=4) as pipeline:
        pipeline.save(tmp_path)
        with pytest.raises(ValueError, match="a loss is not negative"):
            pipeline.scheduler_step(-1.0)
        with pytest.raises(pp.PipelineError, match=r"scheduler_step\(\) has failed .*: load\(\) a checkpoint"):
            pipeline.step()
        pipeline.load(tmp_path)
        pipeline.step()


def test_a_worker_that_was_started_again_has_no_rate_to_tell_and_none_to_change() -> None:
    """The operation uses no channel, from which the others would learn of its death."""
    no: Any = None  # a part that learning rates do not need
    training, restart_check = Training([], adam, None), RestartCheck("stages/1")
    successor = WorkerState({}, training, no, no, no, no, restart_check, no, no, no)
    with pytest.raises(lp.Unavailable, match="stages/1 was started again"):
        successor.learning_rates(GetLearningRates())
    with pytest.raises(lp.Unavailable, match="stages/1 was started again"):
        successor.step_scheduler(StepScheduler(1.0))


def test_a_check_never_steps_a_scheduler_of_a_metric() -> None:
    assert pp.check(model_on_plateau(optimizer=adam), BATCHES[:3], stages=2, microbatches=4).equal
