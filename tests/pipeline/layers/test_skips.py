"""Values that skip stages: stashed by one layer, popped by a later one, with the bits of one process.

Shapes: B samples, C channels, H x W pixels, D features.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.skips import call
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    launched_many,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([6, 5, 6])
IMAGES = random_batches([6, 5, 6], 1, 8, 8)


class Down(nn.Module):
    """Keeps its features for the way up."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(x_BCHW).relu()
        return nn.functional.max_pool2d(features, 2), features


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x_BCHW: Tensor, skip_BCHW: Tensor) -> Tensor:
        up = nn.functional.interpolate(x_BCHW, scale_factor=2.0)
        return self.conv(torch.cat([up, skip_BCHW], 1)).tanh()


def unet() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        pp.Stash("large", Down(1, 4)),
        pp.Stash("small", Down(4, 6)),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.Dropout(0.3),
        pp.Pop("small", Up(12, 4)),
        nn.BatchNorm2d(4),
        pp.Pop("large", Up(8, 1)),
    ]


class PlainSkips(PlainLoop):
    """The plain loop, for layers of pp.Sequential."""

    def _forward(self, x: Any, microbatch: int) -> Any:
        stashed: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            with pp.step_rng(self.model.seed, i, self.steps_done, microbatch):
                x = call(layer, (x,), stashed)
        return x

    def output(self, x: Any) -> Any:
        module = pp.Sequential(copy.deepcopy(self.layers)).eval()
        with torch.no_grad():
            return module(x)


def assert_trains_alike(pipeline: pp.PipelineClient, plain: PlainLoop, batches: list[tuple[Any, Any]]) -> None:
    assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
    assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert torch.equal(pipeline.forward(batches[0][0]), plain.output(batches[0][0]))


def test_a_unet_in_stages_equals_sequential_in_one_process() -> None:
    layers = [layer for layer in unet() if not isinstance(layer, nn.Dropout)]
    model = pp.Model(layers, squared_error, sgd)
    with launched("thread", model, IMAGES, stages=3, microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.steps()]
        trained = pipeline.state_dict()

    plain = pp.Sequential(layers)
    optimizer = sgd(plain.parameters())
    expected = []
    for inputs, targets in IMAGES:
        total = 0.0
        for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            loss = squared_error(plain(x), y)
            total += loss.item() * (len(y) / len(targets))
            (loss * (len(y) / len(targets))).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert losses == expected
    assert_same_state(trained, plain.state_dict())


CUTS: list[dict[str, Any]] = [
    {"stages": 1},
    {"stages": 7, "schedule": "gpipe"},
    {"stages": 4, "schedule": "1f1b"},
    {"stages": 3, "schedule": "interleaved"},
    {"stages": 2, "schedule": "looped_bfs"},
    {"stages": 4, "schedule": "zb_h1"},
    {"stages": 2, "schedule": "zbv"},
    {"stages": 2, "schedule": "dualpipev"},
]


@pytest.mark.parametrize("options", CUTS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_unet_in_every_schedule_and_cut(options: dict[str, Any]) -> None:
    model = pp.Model(unet(), squared_error, adam)
    with launched("thread", model, IMAGES, microbatches=5, clip_grad_norm=0.1, **options) as pipeline:
        assert_trains_alike(pipeline, PlainSkips(model, 5, 0.1), IMAGES)
        mean = pipeline.evaluate(IMAGES * 4).loss  # as many at a time as there are batches: more than credits
        assert mean == pytest.approx(
            float(torch.tensor([pipeline.evaluate([b]).loss * len(b[0]) for b in IMAGES]).sum() / 17)
        )


@pytest.mark.slow
def test_a_unet_of_stages_in_processes() -> None:
    model = pp.Model(unet(), squared_error, adam)
    chosen = [CUTS[1], CUTS[3], CUTS[5]]
    with launched_many("process", [(model, IMAGES, {**options, "microbatches": 5}) for options in chosen]) as clients:
        for client in clients:
            assert_trains_alike(client, PlainSkips(model, 5), IMAGES)


def test_skips_between_stages_of_which_one_worker_has_most() -> None:
    # Refused: "schedule 'forward': deadlock", of an order that the user has not made.
    placement = [0, 1, 0, 1, 1, 1, 2]
    orders: list[list[str]] = [[], [], []]
    for m in range(3):
        for op, stages in (("F", range(7)), ("B", reversed(range(7)))):
            for stage in stages:
                orders[placement[stage]].append(f"{stage}{op}{m}")
    schedule = pp.Schedule.from_csv("\n".join(map(",".join, orders)), "lopsided")
    model = pp.Model(unet(), squared_error, sgd)
    plain = PlainSkips(model, 3)
    cuts = list(range(1, 7))
    with launched("thread", model, IMAGES, stages=cuts, schedule=schedule, microbatches=3) as pipeline:
        assert_trains_alike(pipeline, plain, IMAGES)
        many = random_batches([1] * 20, 1, 8, 8)
        outputs = list(pipeline.forward_stream((x for x, _ in many), in_flight=20))
    assert all(torch.equal(got, plain.output(x)) for got, (x, _) in zip(outputs, many, strict=True))


class Branches(nn.Module):
    """Two values in a dict, of which one is also what flows on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y = self.inner(x)
        return y, {"same": y, "other": y.sigmoid(), "scale": 2.0}


class Joins(nn.Module):
    def forward(self, x: Tensor, value: dict[str, Any]) -> Tensor:
        return x * value["same"] + value["same"].sin() + value["other"] * value["scale"]


class UsesItsInputTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * x.cos()


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Adds(nn.Module):
    def forward(self, x: Tensor, *values: Tensor) -> Tensor:
        for value in values:
            x = x + value.tanh()
        return x


def _linear() -> nn.Module:
    return nn.Linear(D, D)


def _irregular() -> dict[str, list[Any]]:
    return {
        "a value of several tensors": [pp.Stash("a", Branches()), UsesItsInputTwice(), _linear(), pp.Pop("a", Joins())],
        "what is stashed is used twice by the next stage": [
            _linear(),
            pp.Stash("a", Keeps()),
            UsesItsInputTwice(),
            pp.Pop("a", Adds()),
        ],
        "one tensor under two names": [
            _linear(),
            pp.Stash("a", Keeps()),
            pp.Stash("b", Keeps()),
            UsesItsInputTwice(),
            pp.Pop("a", Adds()),
            pp.Pop("b", Adds()),
        ],
        "crossing": [
            pp.Stash("a", Branches()),
            pp.Stash("b", Keeps()),
            UsesItsInputTwice(),
            pp.Pop("a", Joins()),
            _linear(),
            pp.Pop("b", Adds()),
        ],
        "an in-place layer behind it": [
            _linear(),
            pp.Stash("a", Keeps()),
            nn.ReLU(inplace=True),
            _linear(),
            pp.Pop("a", Adds()),
        ],
        "the input itself": [pp.Stash("a", Keeps()), _linear(), _linear(), pp.Pop("a", Adds()), _linear()],
        "popped and stashed by one layer": [
            pp.Stash("a", Branches()),
            _linear(),
            pp.Pop("a", pp.Stash("b", _JoinsAndKeeps())),
            _linear(),
            pp.Pop("b", Adds()),
        ],
        "two popped by one layer": [
            pp.Stash("a", Keeps()),
            pp.Stash("b", Branches()),
            _linear(),
            pp.Pop("a", pp.Pop("b", _TakesThree())),
        ],
        "a value that nobody uses": [_linear(), pp.Stash("a", Keeps()), _linear(), pp.Pop("a", _Ignores())],
    }


class _JoinsAndKeeps(nn.Module):
    def forward(self, x: Tensor, value: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return x * value["same"], value["other"].exp()


class _TakesThree(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: dict[str, Any]) -> Tensor:
        return x * a.cos() + b["other"] * b["same"]


class _Ignores(nn.Module):
    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", _irregular())
def test_irregular_skips_cut_everywhere(name: str, schedule: str) -> None:
    torch.manual_seed(2)
    layers = _irregular()[name]
    model = pp.Model(layers, squared_error, sgd)
    for stages in {2, len(layers)}:
        with launched("thread", model, BATCHES, stages=stages, microbatches=3, schedule=schedule) as pipeline:
            assert_trains_alike(pipeline, PlainSkips(model, 3), BATCHES)


def test_factories_and_functions_make_skips_too() -> None:
    factories = [
        pp.Stash("a", pp.Layer(Branches)),
        pp.Layer(nn.Linear, D, D),
        pp.Layer(pp.Stash, "b", pp.Layer(Keeps)),
        pp.Pop("b", pp.Layer(Adds)),
        pp.Pop("a", pp.Layer(Joins)),
    ]

    def generator() -> Any:
        yield pp.Stash("a", Branches())
        yield nn.Linear(D, D)
        yield pp.Stash("b", Keeps())
        yield pp.Pop("b", Adds())
        yield pp.Pop("a", Joins())

    states = []
    for layers in (factories, generator):
        with launched("thread", pp.Model(layers, squared_error, sgd), BATCHES, stages=4, microbatches=3) as pipeline:
            list(pipeline.steps())
            states.append(pipeline.state_dict())
    plain = PlainSkips(pp.Model(generator, squared_error, sgd), 3)
    plain.steps(BATCHES)
    for state in states:
        assert_same_state(state, plain.state_dict())


def test_a_stash_leaves_no_trace_in_names() -> None:
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = pp.Sequential([pp.Stash("a", bare[0]), pp.Pop("a", pp.Stash("b", bare[1]))])
    assert list(wrapped.state_dict()) == list(bare.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in bare.named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in bare.named_buffers()]
    assert wrapped.get_parameter("0.weight") is bare[0].weight
    other = copy.deepcopy(wrapped)
    other.load_state_dict({name: torch.ones_like(value) for name, value in bare.state_dict().items()})
    assert other.get_parameter("1.bias").eq(1).all()
    assert not wrapped.get_parameter("1.bias").eq(1).all()
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})
    assert list(pickle.loads(pickle.dumps(wrapped)).state_dict()) == list(bare.state_dict())
    assert not any(module.training for module in wrapped.eval().modules())
    assert {type(module) for module in wrapped.modules()} == {
        pp.Sequential,
        pp.Stash,
        pp.Pop,
        nn.Linear,
        nn.BatchNorm1d,
    }


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([pp.Stash("a", Keeps()), nn.ReLU()], r"Stash\('a'\) is never popped: add pp.Pop"),
        ([pp.Pop("a", Adds()), pp.Stash("a", Keeps())], r"layer 0, Pop\('a'\): no layer before it stashes"),
        ([pp.Stash("a", Keeps()), pp.Pop("a", Adds()), pp.Pop("a", Adds())], r"layer 2, Pop\('a'\): .* popped already"),
        ([pp.Stash("a", Keeps()), pp.Stash("a", Keeps())], r"layer 1, Stash\('a'\): this name is stashed already"),
        ([nn.Sequential(pp.Stash("a", Keeps())), nn.ReLU()], r"Stash\('a'\) is inside another module"),
        ([pp.Layer(lambda: pp.Stash("a", Keeps())), nn.ReLU()], r"write pp.Stash\('a', pp.Layer\(…\)\)"),
    ],
)
def test_a_value_is_stashed_once_and_popped_once(layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pp.add_pipeline(lp.Program("skips"), pp.Model(layers, squared_error, sgd))


def test_what_is_wrong_with_a_skip_is_said_where_it_runs() -> None:
    with pytest.raises(pp.PipelineError, match=r"layer of Stash\('a'\) must return \(y, value\), not Tensor"):
        pp.Sequential([pp.Stash("a", nn.ReLU())])(torch.ones(1))
    with pytest.raises(pp.PipelineError, match=r"Pop\('a'\): no layer before it has stashed"):
        pp.Sequential([pp.Pop("a", Adds())])(torch.ones(1))
    with pytest.raises(TypeError, match=r"Stash takes a module or a pp.Layer, not 3"):
        pp.Stash("a", 3)


def test_a_failed_step_leaves_no_values_behind() -> None:
    fails = [True]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and len(target) < 2:
            fails.pop()
            raise ValueError("a bad pixel")
        return squared_error(output, target)

    batches = random_batches([5, 6], 1, 8, 8)
    model = pp.Model(unet(), loss, sgd)
    with launched("thread", model, batches, stages=4, microbatches=3) as pipeline:
        with pytest.raises(ValueError, match="a bad pixel"):
            pipeline.step()
        pipeline.load_state_dict(PlainSkips(model, 3).state_dict())  # statistics of the BatchNorm
        assert_trains_alike(pipeline, PlainSkips(model, 3), batches)
