"""The ways to say what a model's layers are, and what is refused."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.build import build_layers, parameter_count
from lp_pipe.pipeline.layers.model import sources_of
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([4, 4])


def a_list() -> list[nn.Module]:
    return [nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)]


def a_sequential() -> nn.Sequential:
    return nn.Sequential(*a_list())


def a_generator() -> Iterator[nn.Module]:
    yield from a_list()


class Block(nn.Module):
    """A layer whose constructor looks at values, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 0.5, 3).tolist()[1]
        self.inner = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.inner(x), self.rate, self.training)


def drawn_by_numpy(features: int) -> nn.Linear:
    """Return a Linear whose weights numpy sets; on the meta device that is a TypeError."""
    layer = nn.Linear(features, features)
    layer.weight.detach().numpy()[:] = np.eye(features)
    return layer


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_layers_may_be_modules_factories_or_a_function(mode: str) -> None:
    forms: dict[str, Any] = {
        "a list": a_list(),
        "an nn.Sequential": a_sequential(),
        "a ModuleList": nn.ModuleList(a_list()),
        "factories": [pp.Layer(nn.Linear, D, D, bias=False), pp.Layer(Block, name="block"), pp.Layer(nn.Linear, D, D)],
        "a factory that takes numpy": [pp.Layer(drawn_by_numpy, D), nn.Linear(D, D)],
        "factories and modules": [nn.Linear(D, D), pp.Layer(nn.ReLU), pp.Layer(nn.Linear, D, D)],
        "a function": a_sequential,
        "a closure": lambda: [nn.Linear(D, 2 * D), nn.Linear(2 * D, D)],
        "a generator": a_generator,
    }
    program = lp.Program("forms")
    models = {name: pp.Model(layers, squared_error, sgd, seed=4) for name, layers in forms.items()}
    several = mode == "thread"
    chosen = models if several else {name: models[name] for name in ("a list", "a closure", "a generator", "factories")}
    handles = {
        name: pp.add_pipeline(program, model, stages=2, microbatches=2, group=f"stages {index}")
        for index, (name, model) in enumerate(chosen.items())
    }
    with lp.launch(program, mode) as run:
        for name, model in chosen.items():
            pipeline, plain = run.client(handles[name]), PlainLoop(model, 2)
            assert_same_state(pipeline.state_dict(), plain.state_dict())
            assert [pipeline.step(batch).loss for batch in BATCHES] == plain.steps(BATCHES)
            assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_initial_weights_are_the_same_for_every_number_of_stages() -> None:
    model = model_with_everything()
    fingerprints = set()
    for stages in (1, 2, 4):
        with launched("thread", model, stages=stages) as pipeline:
            fingerprints.add(pipeline.fingerprint())
    assert len(fingerprints) == 1
    with launched("thread", model_with_everything(seed=6)) as pipeline:
        assert pipeline.fingerprint() not in fingerprints


class Lazy(Sequence[nn.Module]):
    """Builds a layer when it is asked for it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return nn.Linear(D, D) if index < 3 else [][index]


LAZY: dict[str, Any] = {
    "a generator expression": lambda: (nn.Linear(D, D) for _ in range(3)),
    "a map": lambda: map(nn.Linear, [D] * 3, [D] * 3),
    "a lazy sequence": Lazy,
}


@pytest.mark.parametrize("form", LAZY)
def test_layers_that_are_made_as_they_are_asked_for_have_the_weights_of_factories(form: str) -> None:
    # Only generator functions had: the others' layers were made after the seed, by whatever the process had drawn.
    models = [pp.Model(layers, squared_error, sgd, seed=4) for layers in (LAZY[form], [pp.Layer(nn.Linear, D, D)] * 3)]
    fingerprints = set()
    for model in models:
        with launched("thread", model, stages=2) as pipeline:
            fingerprints.add(pipeline.fingerprint())
    assert len(fingerprints) == 1


@pytest.mark.parametrize("form", ["modules", "function that keeps them"])
def test_the_users_own_modules_are_never_trained(form: str) -> None:
    """Stages in threads could reach them. A function may give the same modules at every call."""
    module = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(3), nn.Linear(D, D))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    layers = module if form == "modules" else lambda: module
    with launched("thread", pp.Model(layers, squared_error, adam), BATCHES) as pipeline:
        assert len(list(pipeline.steps())) == 2
        assert not torch.equal(pipeline.state_dict()["0.weight"], before["0.weight"])
    assert_same_state(module.state_dict(), before)
    assert all(parameter.grad is None for parameter in module.parameters())


class Normed(nn.Linear):
    """Keeps what its forward made, as torch.nn.utils.weight_norm and many attention layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scaled = self.weight / self.weight.norm()
        return nn.functional.linear(x, self.scaled, self.bias)


def test_modules_that_were_called_before_may_keep_what_they_made() -> None:
    # torch refuses to copy tensors with a graph, so that the stages' start failed in thread mode only.
    layers = [Normed(D, D), nn.Tanh(), Normed(D, D)]
    nn.Sequential(*layers)(BATCHES[0][0])
    model = pp.Model(layers, squared_error, adam)
    with launched("thread", model, BATCHES, stages=2, microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.steps()]
        state = pipeline.state_dict()
    assert all(not layer.scaled.is_leaf for layer in layers if isinstance(layer, Normed))
    for layer in (layers[0], layers[2]):
        del layer.scaled  # for the plain loop copies them as well
    plain = PlainLoop(model, 2)
    assert losses == plain.steps(BATCHES)
    assert_same_state(state, plain.state_dict())


def test_a_parameter_shared_within_a_stage_stays_shared() -> None:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    second.weight = first.weight
    model = pp.Model([first, nn.Tanh(), second, nn.Linear(D, D)], squared_error, adam)
    plain = PlainLoop(model, 2)
    with launched("thread", model, BATCHES, stages=[3], microbatches=2) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_parameters_are_counted_without_the_random_state_noticing() -> None:
    before = torch.get_rng_state()
    assert parameter_count(pp.Layer(nn.Linear, 10, 10)) == 110
    assert parameter_count(nn.ReLU()) == 0
    assert parameter_count(pp.Layer(Block)) == D * D + D
    assert torch.equal(torch.get_rng_state(), before)


def test_counting_a_factorys_parameters_allocates_nothing() -> None:
    assert parameter_count(pp.Layer(nn.Linear, 2**20, 2**20, bias=False)) == 2**40


def test_a_stage_builds_its_own_layers_only() -> None:
    built: list[int] = []

    def layer(index: int) -> nn.Module:
        built.append(index)
        return nn.Linear(1, 1)

    sources = sources_of(pp.Model([pp.Layer(layer, index) for index in range(4)], squared_error, sgd))
    build_layers(sources[2:], 2, seed=0)
    assert built == [2, 3]


def test_a_factorys_name_is_for_messages() -> None:
    assert repr(pp.Layer(nn.Linear, 1, 1)) == "Layer(Linear)"
    assert repr(pp.Layer(lambda: nn.ReLU(), name="activation")) == "Layer(activation)"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "no layers"),
        (3, "int"),
        (nn.ReLU(), "ReLU"),
        ([nn.ReLU(), "tanh"], "layer 1 is 'tanh', but must be"),
        (
            [nn.ReLU],
            r"layer 0 is .*; write ReLU\(\.\.\.\), or pp.Layer\(ReLU, \.\.\.\) for a layer that its stage builds$",
        ),
        (
            [nn.ReLU(), lambda x: x.flatten(1)],
            r"layer 1 is .*; .*\(x -> y\) .*nn.ReLU\(\) for .*pp.Layer",
        ),
        ([[nn.ReLU()], [nn.ReLU()]], r"layer 0 is .*; write the layers one after another"),
        (nn.Bilinear(1, 1, 1), r"not Bilinear: cut it by pp\.split\(\)"),
        ({"relu": nn.ReLU()}, r"not dict: write list\(layers.values\(\)\)$"),
        (nn.ModuleDict({"relu": nn.ReLU()}), r"not ModuleDict: write list\(layers.values\(\)\)$"),
        (iter([nn.ReLU()]), r"not list_iterator: write list\(layers\)$"),
        (
            [pp.Layer(lambda: torch.relu)],
            "the factory of Layer.* returned <built-in .* relu .*>, which is no nn.Module",
        ),
        (lambda: [], "no layers"),
        (lambda: [nn.ReLU(), 3], "layer 1 is 3"),
        (lambda: nn.ReLU(), "ReLU"),
    ],
)
def test_what_is_no_sequence_of_layers_is_refused(layers: Any, message: str) -> None:
    with pytest.raises(pp.PipelineError, match=message):
        pp.add_pipeline(lp.Program("wrong"), pp.Model(layers, squared_error, sgd), stages=1)


def test_a_factory_must_be_callable_and_return_a_module() -> None:
    with pytest.raises(TypeError, match="not 3"):
        pp.Layer(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not Linear.*pass modules as they are"):
        pp.Layer(nn.Linear(1, 1))
    with pytest.raises(pp.PipelineError, match=r"factory of Layer\(int\) returned 0"):
        build_layers([pp.Layer(int)], 0, seed=0)  # type: ignore[arg-type]


def test_the_factory_that_fails_is_named() -> None:
    """Name the one of many layers that has an argument too few."""
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Linear, D, bias=False)]
    with pytest.raises(TypeError, match="out_features") as caught:
        pp.add_pipeline(lp.Program("wrong"), pp.Model(layers, squared_error, sgd))
    assert caught.value.__notes__ == [f"in the factory of Layer(Linear), which was given ({D}, bias=False)"]
    assert caught.value.__context__ is None  # it fails on the meta device, too, which was told first


def test_the_other_parts_of_a_model_are_checked_at_once() -> None:
    with pytest.raises(pp.PipelineError, match="loss_weight='tokens'"):
        pp.Model([nn.ReLU()], squared_error, sgd, loss_weight="tokens")
    with pytest.raises(pp.PipelineError, match="loss_weight=None: give"):  # the step failed: "not callable"
        pp.Model([nn.ReLU()], squared_error, sgd, loss_weight=None)  # type: ignore[arg-type]
    with pytest.raises(pp.PipelineError, match="loss='mse' is not callable: give a function of"):
        pp.Model([nn.ReLU()], "mse", sgd)  # type: ignore[arg-type]
    with pytest.raises(pp.PipelineError, match=r"loss=MSELoss is a class .*loss=MSELoss\(\)"):
        pp.Model([nn.ReLU()], nn.MSELoss, sgd)  # the step failed: "Boolean value of Tensor ... is ambiguous"
    with pytest.raises(pp.PipelineError, match=r"optimizer=(?s:.*) is not callable: give a function of the stage's"):
        pp.Model([nn.ReLU()], squared_error, torch.optim.SGD([nn.Parameter(torch.ones(1))]))  # type: ignore[arg-type]
    for seed in ("a", 1.5, None, 2**63):
        with pytest.raises(pp.PipelineError, match=r"seed=.*: give a whole number \(int\) from -2\*\*63"):
            pp.Model([nn.ReLU()], squared_error, sgd, seed=seed)  # type: ignore[arg-type]


def test_a_seed_of_numpy_is_kept_in_checkpoints(tmp_path: Path) -> None:
    model = pp.Model([pp.Layer(nn.Linear, D, D)], squared_error, sgd, seed=np.int64(3))  # type: ignore[arg-type]
    with launched("thread", model, stages=1) as pipeline:
        pipeline.save(tmp_path / "saved")
        pipeline.load(tmp_path / "saved")


def test_a_state_dict_of_something_else_than_tensors_is_refused() -> None:
    model = pp.Model([nn.Linear(D, D)], squared_error, sgd)
    with launched("thread", model, stages=1) as pipeline:
        state = pipeline.state_dict()
        with pytest.raises(pp.PipelineError, match=r"another model: 0\.weight is a ndarray there, no tensor"):
            pipeline.load_state_dict({name: value.numpy() for name, value in state.items()})  # type: ignore[misc]


class Scales(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


class Shifts(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.shift = nn.Parameter(torch.zeros(1))


def _hooked() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(2, 2))
    layers.register_forward_hook(lambda module, inputs, output: output * 2)
    return layers


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (Scales(nn.Linear(2, 2)), "a Scales with a forward of its own, which the stages would leave out"),
        (lambda: Scales(nn.Linear(2, 2)), "a Scales with a forward of its own"),
        (Shifts(nn.Linear(2, 2)), "a Shifts with parameters or buffers of its own"),
        (_hooked(), "a Sequential with hooks"),
    ],
)
def test_a_sequential_that_does_more_than_its_layers_is_refused(layers: Any, message: str) -> None:
    """Regression: stages call its layers only, so the rest was silently left out, by `pp.check` too."""
    model = pp.Model(layers, lambda output, target: output.sum(), lambda parameters: torch.optim.SGD(parameters))
    for use in (lambda: pp.add_pipeline(lp.Program("refused"), model), lambda: pp.check(model, [(1, 2)])):
        with pytest.raises(pp.PipelineError, match=message):
            use()


def test_subclasses_that_only_make_their_layers_are_taken() -> None:
    class Mlp(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    for layers in (Mlp(), pp.Sequential([nn.Linear(2, 2), nn.ReLU()])):
        assert len(sources_of(pp.Model(layers, lambda output, target: output.sum(), lambda p: None))) > 1  # type: ignore[arg-type, return-value]
