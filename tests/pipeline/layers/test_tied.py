"""Parameters that several stages have in common stay one parameter, to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.tied import tied_names
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    adam,
    assert_same_state,
    halve_every_two_steps,
    launched,
    launched_many,
    random_batches,
    sgd,
    squared_error,
)
from tests.pipeline.test_exactness import apply

pytestmark = pytest.mark.usefixtures("no_leaks")

WORDS = 11
BATCHES = random_batches([6, 5, 6])


def _tokens(count: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randint(0, WORDS, (count, 5, 4), generator=generator)
    return [(row[:, :-1], row[:, 1:]) for row in numbers]


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def language_model(**options: Any) -> pp.Model:
    layers = [
        pp.Layer(nn.Embedding, WORDS, D),
        pp.Layer(nn.Linear, D, D),
        pp.Layer(nn.Dropout, 0.2),
        pp.Layer(nn.LayerNorm, D),
        pp.Layer(nn.Linear, D, WORDS),
    ]
    tied = [("0.weight", "4.weight")]
    model = pp.Model(layers, _cross_entropy, adam, halve_every_two_steps, tied=tied, seed=3)
    return pp.Model(**{**vars(model), **options})


class PlainTied(PlainLoop):
    """The plain loop, with the model's tied parameters being one object."""

    def __init__(self, model: pp.Model, microbatches: int, clip_grad_norm: float | None = None) -> None:
        super().__init__(model, microbatches, clip_grad_norm)
        for first, other in model.tied:
            index, _, name = other.partition(".")
            setattr(self.layers[int(index)], name, self.module.get_parameter(first))
        self.optimizer = model.optimizer(list(self.module.named_parameters()))
        self.lr_scheduler = model.lr_scheduler(self.optimizer) if model.lr_scheduler else None


def assert_trains_alike(pipeline: pp.PipelineClient, plain: PlainLoop, batches: list[tuple[Any, Any]]) -> None:
    assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
    assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert torch.equal(pipeline.forward(batches[0][0]), plain.output(batches[0][0]))


def test_an_embedding_and_a_head_on_different_stages_are_one_parameter() -> None:
    model, batches = language_model(), _tokens(3)
    with launched("thread", model, batches, stages=2, microbatches=2) as pipeline:
        assert_trains_alike(pipeline, PlainTied(model, 2), batches)
        state = pipeline.state_dict()
        assert torch.equal(state["0.weight"], state["4.weight"])


CUTS: list[dict[str, Any]] = [
    {"stages": 1},
    {"stages": 4, "schedule": "gpipe"},
    {"stages": 5, "schedule": "1f1b"},
    {"stages": 2, "schedule": "interleaved"},
    {"stages": 2, "schedule": "looped_bfs"},
    {"stages": 3, "schedule": "zb_h1"},
    {"stages": 2, "schedule": "zbv"},
    {"stages": 2, "schedule": "dualpipev"},
]


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("options", CUTS, ids=lambda options: "-".join(map(str, options.values())))
def test_tied_parameters_in_every_schedule_and_cut(options: dict[str, Any], clip: float | None) -> None:
    """The norm counts the parameter once; the scheduler and weight decay act on it once."""
    model, batches = language_model(), _tokens(3)
    with launched("thread", model, batches, microbatches=4, clip_grad_norm=clip, **options) as pipeline:
        assert_trains_alike(pipeline, PlainTied(model, 4, clip), batches)


@pytest.mark.slow
def test_tied_parameters_of_stages_in_processes() -> None:
    model, batches = language_model(), _tokens(3)
    chosen = [CUTS[1], CUTS[3], CUTS[5]]
    with launched_many("process", [(model, batches, {**options, "microbatches": 4}) for options in chosen]) as clients:
        for client in clients:
            assert_trains_alike(client, PlainTied(model, 4), batches)


def one_layer_many_times() -> list[nn.Module]:
    shared = nn.Linear(D, D)
    return [shared, nn.Tanh(), shared, shared, nn.Sigmoid(), shared, nn.Linear(D, D), shared, nn.Sequential(shared)]


def with_one_weight() -> list[nn.Module]:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    second.weight = first.weight
    return [first, nn.Tanh(), second]


@pytest.mark.parametrize("form", ["modules", "function"])
@pytest.mark.parametrize("stages", [[1], [1, 2]], ids=str)
def test_one_parameter_in_two_ready_made_layers_is_found(form: str, stages: list[int]) -> None:
    torch.manual_seed(0)
    model = pp.Model(with_one_weight() if form == "modules" else with_one_weight, squared_error, adam)
    with launched("thread", model, BATCHES, stages=stages, microbatches=2) as pipeline:
        assert_trains_alike(pipeline, PlainLoop(model, 2), BATCHES)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("cuts", [[1], [3], [5], [2, 5, 7], [1, 2, 3, 4, 5, 6, 7, 8]], ids=str)
def test_one_layer_used_many_times_adds_its_gradients_last_use_first(cuts: list[int], schedule: str) -> None:
    """Three terms and more: the order in which they are added up shows in the last bits."""
    torch.manual_seed(1)
    model = pp.Model(one_layer_many_times(), squared_error, sgd)
    with launched("thread", model, BATCHES, stages=cuts, microbatches=3, schedule=schedule) as pipeline:
        assert_trains_alike(pipeline, PlainLoop(model, 3), BATCHES)


def _with_hooks() -> nn.Module:
    layer = nn.Linear(D, D)
    layer.weight.register_hook(lambda gradient: gradient * 3)
    return layer


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_hook_of_a_tied_parameter_runs_once(schedule: str) -> None:
    # A borrowing stage built the owner's layer with its hook, which then ran on each gradient, and on the sum.
    layers = [pp.Layer(_with_hooks), pp.Layer(nn.Tanh), pp.Layer(nn.Linear, D, D), pp.Layer(_with_hooks)]
    model = pp.Model(layers, squared_error, sgd, tied=[("0.weight", "2.weight"), ("0.weight", "3.weight")])
    fingerprints = set()
    for stages in (1, [1], [2, 3]):
        with launched("thread", model, BATCHES, stages=stages, microbatches=2, schedule=schedule) as pipeline:
            list(pipeline.steps())
            fingerprints.add(pipeline.fingerprint())
    assert len(fingerprints) == 1


def test_a_sparse_gradient_that_would_be_sent_is_refused() -> None:
    layers = [pp.Layer(nn.Embedding, WORDS, D, sparse=True), pp.Layer(nn.Linear, D, 1)]
    layers += [apply(lambda x: x.detach().abs().long()[..., 0] % WORDS), layers[0], pp.Layer(nn.Linear, D, WORDS)]
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    model = pp.Model(layers, _cross_entropy, optimizer, tied=[("0.weight", "3.weight")])
    match = r"stages 0 and 1 .*'0\.weight'.* sparse"
    with (
        launched("thread", model, stages=[2], microbatches=2) as pipeline,
        pytest.raises(pp.PipelineError, match=match),
    ):
        pipeline.step(_tokens(1)[0])


def _frozen_embedding() -> nn.Module:
    return nn.Embedding(WORDS, D).requires_grad_(False)


def test_a_frozen_tied_parameter_stays_as_it_is() -> None:
    layers = [pp.Layer(_frozen_embedding), *language_model().layers[1:]]
    model, batches = language_model(layers=layers), _tokens(3)
    with launched("thread", model, batches, stages=3, microbatches=2) as pipeline:
        assert_trains_alike(pipeline, PlainTied(model, 2), batches)


def test_a_checkpoint_of_tied_parameters_goes_on_with_other_stages(tmp_path: Path) -> None:
    model, batches = language_model(), _tokens(4)
    plain = PlainTied(model, 2)
    plain.steps(batches)
    with launched("thread", model, batches, stages=3, microbatches=2) as pipeline:
        list(pipeline.steps(2))
        pipeline.save(tmp_path)
    for options in (CUTS[0], CUTS[1], CUTS[3]):
        with launched("thread", model, batches, microbatches=2, **options) as pipeline:
            pipeline.load(tmp_path)
            assert [result.step for result in pipeline.steps()] == [2, 3]
            assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_loading_two_values_for_one_parameter_keeps_the_last_as_torch_does() -> None:
    model = language_model()
    plain = PlainTied(model, 2)
    state = {name: torch.full_like(value, index) for index, (name, value) in enumerate(plain.state_dict().items())}
    plain.module.load_state_dict(state)
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        pipeline.load_state_dict(state)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_a_failed_step_leaves_no_gradients_of_tied_parameters_behind() -> None:
    fails = [True]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and len(target) < 2:  # the last micro-batch of the step, when others have gone backward
            fails.pop()
            raise ValueError("no such word")
        return _cross_entropy(output, target)

    model, batches = language_model(loss=loss), _tokens(3)
    with launched("thread", model, batches, stages=3, microbatches=3) as pipeline:
        with pytest.raises(ValueError, match="no such word"):
            pipeline.step()
        assert_trains_alike(pipeline, PlainTied(model, 3), batches)


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ([("0.weight", "head.weight")], "no parameter 'head.weight': use the names .* '0.weight'"),
        ([("0.weight", "4.bias")], r"\[11, 8\] of torch.float32 and \[11\] of .*: only equal shapes"),
        (["0.weight"], "give pairs of parameter names"),
        ([("0.weight", "9.weight")], "no parameter '9.weight'"),
    ],
)
def test_what_cannot_be_tied_is_refused_before_launch(tied: Any, message: str) -> None:
    with pytest.raises(pp.PipelineError, match=message):
        pp.add_pipeline(lp.Program("tied"), language_model(tied=tied))


def test_a_buffer_shared_across_stages_is_refused_with_the_way_out() -> None:
    norm = nn.BatchNorm1d(3)
    model = pp.Model([norm, nn.Tanh(), norm], squared_error, sgd)
    with pytest.raises(pp.PipelineError, match=r"layers 0 and 2 share a buffer .*\(cuts \[1\]\).* one stage"):
        pp.add_pipeline(lp.Program("tied"), model, stages=[1])


class Angles(nn.Module):
    """A constant such as rotary positions, which all blocks look up in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, D), persistent=False)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.angles += 0.1
        return x * self.angles.cos()


class Block(nn.Module):
    def __init__(self, angles: Angles) -> None:
        super().__init__()
        self.angles, self.linear = angles, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.angles(x)).tanh()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_have_copies_of_a_constant_that_their_layers_share(schedule: str) -> None:
    """Regression: all shared buffers were refused, and no model with shared rotary positions could be cut."""
    angles = Angles()
    model = pp.Model([Block(angles) for _ in range(4)], squared_error, sgd)
    report = pp.check(model, random_batches([4, 6]), stages=2, schedule=schedule, microbatches=2)
    assert report.equal, report


def test_a_shared_buffer_that_a_layer_writes_to_fails_the_step_with_the_way_out() -> None:
    angles = Angles()
    angles.writes = True
    model = pp.Model([Block(angles), nn.Tanh(), Block(angles)], squared_error, sgd)
    expected = r"layers 0 and 2 share a buffer \(2.angles.angles\) that training writes to, .* one stage, or give each"
    with launched("thread", model, stages=[1], microbatches=2) as pipeline:
        before = pipeline.fingerprint()
        with pytest.raises(pp.PipelineError, match=expected):
            pipeline.step(random_batches([4])[0])
        assert pipeline.fingerprint() == before
    with launched("thread", model, stages=1, microbatches=2) as pipeline:
        pipeline.step(random_batches([4])[0])


def test_names_of_one_parameter_come_in_the_order_of_the_layers() -> None:
    pairs = [("3.weight", "2.weight"), ("0.weight", "3.weight")]
    assert tied_names([nn.Linear(D, D) for _ in range(4)], pairs) == [("0.weight", "2.weight", "3.weight")]
    ready: Callable[[], list[nn.Module]] = with_one_weight
    assert tied_names(ready(), []) == [("0.weight", "2.weight")]
