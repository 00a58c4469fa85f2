"""Optimizers and schedulers that would not train what the user thinks are refused at the start."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.optimizer_factories import make_optimizer, make_scheduler, wants_metric
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, sgd, squared_error

NAMED = [(name, parameter) for name, parameter in nn.Linear(2, 2).named_parameters()]
WITHIN_S = 20.0


def test_a_list_of_names_and_parameters_makes_an_optimizer_and_that_a_scheduler() -> None:
    optimizer = make_optimizer(lambda named: torch.optim.Adam(named[:1]), NAMED)
    assert optimizer.param_groups[0]["params"] == [NAMED[0][1]]
    scheduler = make_scheduler(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), optimizer)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.0005]


def test_an_optimizer_of_the_users_own_module_fails_the_start() -> None:
    """Regression: it was stepped and trained nothing, since stages have copies."""
    module = nn.Linear(2, 2)
    program = lp.Program("mistake")
    pp.add_pipeline(
        program, pp.Model([module], squared_error, lambda _: torch.optim.SGD(module.parameters())), stages=1
    )
    with pytest.raises(lp.NodeError, match=r"an? SGD of other parameters than it was given: stages train copies"):
        lp.launch(program, "thread").wait(WITHIN_S)


def test_groups_of_pairs_are_refused_where_one_is_empty_and_groups_of_parameters_are_not() -> None:
    """A stage with an embedding alone has nothing without weight decay: torch's error said nothing of that."""

    def by_kind(named: Any, pick: Any) -> torch.optim.Optimizer:
        kinds = [pick(item) for item in named if item[1].ndim > 1], [pick(item) for item in named if item[1].ndim < 2]
        return torch.optim.AdamW([{"params": kinds[0]}, {"params": kinds[1], "weight_decay": 0.0}])

    with pytest.raises(pp.PipelineError, match=r"empty on this stage worker \(weight\).* parameters alone"):
        make_optimizer(lambda named: by_kind(named, lambda item: item), NAMED[:1])
    optimizer = make_optimizer(lambda named: by_kind(named, lambda item: item[1]), NAMED[:1])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda named: None, "has returned None, which is no torch optimizer"),
        (lambda named: torch.optim.SGD, "which is no torch optimizer"),
        (lambda named: [torch.optim.SGD(named, lr=0.1)], "no torch optimizer: combine them"),
        (
            lambda named: sgd([p for name, p in named if "norm" in name]),
            "has left out all of these: weight, bias: give",
        ),
        (lambda named: torch.optim.LBFGS([p for _, p in named]), "LBFGS needs a closure, to evaluate the loss"),
    ],
)
def test_what_is_no_optimizer_of_these_parameters_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(pp.PipelineError, match=message):
        make_optimizer(factory, NAMED)


def test_other_errors_of_a_factory_are_its_own() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        make_optimizer(lambda named: torch.optim.SGD(named, lr=-1.0), NAMED)
    assert not isinstance(caught.value, pp.PipelineError)


def rate_of_the_first_layer(named: Any) -> torch.optim.Optimizer:
    first = dict(named)["0.weight"]
    return torch.optim.SGD(
        [{"params": [first], "lr": 1.0}, {"params": [p for _, p in named if p is not first]}], lr=0.1
    )


def a_rate_for_each_of_three(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2, 0.3], total_steps=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": rate_of_the_first_layer},
            "KeyError: '0.weight'.*in optimizer=rate_of_the_first_layer, which every stage worker calls with its own "
            "parameters, here 1.weight, 1.bias, 2.weight, 2.bias and 2 more",
        ),
        (
            {"lr_scheduler": a_rate_for_each_of_three},
            "max_lr has 3 values, param_groups has 1.*in lr_scheduler=a_rate_for_each_of_three, which every stage "
            "worker calls with the optimizer of its own parameters, which has 1 group here: make lists",
        ),
    ],
    ids=["optimizer", "scheduler"],
)
def test_who_thinks_of_the_whole_model_is_told_that_a_stage_has_a_part(options: dict[str, Any], message: str) -> None:
    program = lp.Program("mistake")
    layers = [pp.Layer(nn.Linear, 2, 2) for _ in range(4)]
    model = pp.Model(layers, squared_error, **{"optimizer": sgd, **options})
    pp.add_pipeline(program, model, stages=[1])
    with pytest.raises(lp.NodeError, match=f"(?s){message}") as caught:
        lp.launch(program, "thread").wait(WITHIN_S)
    assert "which every stage worker calls" in caught.value.report


class Steps:
    """A scheduler by its `step` alone."""

    def __init__(self, step: Any) -> None:
        self.step = step


@pytest.mark.parametrize(
    ("step", "is_metric"),
    [
        (lambda: None, False),
        (lambda epoch=None: None, False),
        (lambda *args, **kwargs: None, False),
        (lambda metrics, epoch=None: None, True),
    ],
    ids=["nothing", "default", "any", "metric"],
)
def test_what_step_must_be_given_is_a_metric(step: Any, is_metric: bool) -> None:
    scheduler = make_scheduler(lambda optimizer: Steps(step), sgd(NAMED))
    assert wants_metric(scheduler) == is_metric


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda optimizer: None, "has returned None, which is no torch scheduler"),
        (
            lambda optimizer: Steps(lambda loss, accuracy: None),
            r"Steps.step\(\) needs loss, accuracy, but .* one number",
        ),
        (lambda optimizer: Steps(lambda *, loss: None), r"Steps.step\(\) needs loss"),
    ],
)
def test_a_scheduler_is_stepped_without_arguments_or_with_one(factory: Any, message: str) -> None:
    """Regression: one that wants more failed after the update, and only a checkpoint mended the pipeline."""
    with pytest.raises(pp.PipelineError, match=message):
        make_scheduler(factory, sgd(NAMED))


def test_a_learning_rate_that_is_a_tensor_is_each_workers_own() -> None:
    """Schedulers write to it: the two of stages that are threads both halved the one that the program had made."""
    rate = torch.tensor(0.1)
    layers = [pp.Layer(nn.Linear, D, D) for _ in range(2)]
    model = pp.Model(
        layers,
        squared_error,
        lambda named: torch.optim.Adam(named, lr=rate),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    plain = PlainLoop(replace(model, optimizer=lambda named: torch.optim.Adam(named, lr=rate.clone())), 2)
    batches = random_batches([4, 4, 4])
    with launched("thread", model, batches, stages=2, microbatches=2) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
    assert rate == 0.1


def test_a_scheduler_in_place_of_a_function_is_refused_at_once() -> None:
    with pytest.raises(pp.PipelineError, match=r"lr_scheduler=0\.1 is not callable: give a function"):
        pp.Model([nn.Linear(2, 2)], squared_error, sgd, lr_scheduler=0.1)  # type: ignore[arg-type]


def by_their_marks(named: Any) -> torch.optim.Optimizer:
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for _, parameter in named:
        kinds[getattr(parameter, "_no_weight_decay", False)].append(parameter)
    return torch.optim.SGD([{"params": kinds[False], "weight_decay": 0.5}, {"params": kinds[True]}], lr=0.1)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_an_optimizer_sees_what_ready_made_layers_have_noted_on_their_parameters(mode: str) -> None:
    """Regression: copies lost notes such as Mamba's `_no_weight_decay`, so that all parameters silently decayed."""
    torch.manual_seed(0)
    layers = [nn.Linear(D, D), nn.Linear(D, D)]
    for layer in layers:
        layer.weight._no_weight_decay = True  # type: ignore[assignment]
    batches = random_batches([4, 6])
    with launched(mode, pp.Model(layers, squared_error, by_their_marks), batches, stages=2, microbatches=1) as pipeline:
        list(pipeline.steps())
        state = pipeline.state_dict()
    whole = nn.Sequential(*layers)  # never copied
    optimizer = by_their_marks(list(whole.named_parameters()))
    for x, y in batches:
        squared_error(whole(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(state, whole.state_dict())
