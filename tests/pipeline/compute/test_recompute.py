"""Recompute: less memory until the backward, one more forward in it, the same bits."""

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.layers.message import Message
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    assert_same_state,
    launched,
    launched_many,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)
from tests.pipeline.test_refusals import refuses

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([10, 3, 12])
OPTIONS: dict[str, Any] = {
    "full": "full",
    "every 2": ("every", 2),
    "linears": lambda index, layer: isinstance(layer, nn.Linear),
    "all but norms": lambda index, layer: not isinstance(layer, (nn.BatchNorm1d, nn.LayerNorm)),
}
SCHEDULES = {"gpipe": 3, "1f1b": 3, "zb_h1": 3, "zbv": 2, "dualpipev": 2}


FAST = {("full", "zb_h1"), ("full", "dualpipev"), ("every 2", "1f1b"), ("linears", "zbv"), ("all but norms", "gpipe")}


@pytest.mark.parametrize(
    ("recompute", "schedule"),
    [
        pytest.param(*both, marks=[] if both in FAST else pytest.mark.slow)
        for both in itertools.product(OPTIONS, SCHEDULES)
    ],
)
def test_recompute_trains_to_the_bits_of_the_plain_loop(recompute: str, schedule: str) -> None:
    """Train with dropout, a BatchNorm and an in-place layer."""
    model = model_with_everything()
    plain = PlainLoop(model, 4, 0.1)
    options = {"stages": SCHEDULES[schedule], "schedule": schedule, "microbatches": 4, "clip_grad_norm": 0.1}
    with launched("thread", model, BATCHES, recompute=OPTIONS[recompute], **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
        assert pipeline.evaluate(BATCHES[:1]).loss == plain.evaluate(BATCHES[0])


@pytest.mark.slow
def test_processes_recompute_to_the_same_bits() -> None:
    model = model_with_everything()
    chosen: list[dict[str, Any]] = [
        {"stages": 2, "recompute": "full"},
        {"stages": 2, "schedule": "zb_h1", "recompute": lambda index, layer: index % 2 == 0},
    ]
    with launched_many("process", [(model, BATCHES, {"microbatches": 4, **options}) for options in chosen]) as clients:
        for client in clients:
            plain = PlainLoop(model, 4)
            assert [result.loss for result in client.steps()] == plain.steps(BATCHES)
            assert_same_state(client.state_dict(), plain.state_dict())


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.sin()


class Adds(nn.Module):
    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        return x * value


class WritesToItsInput(nn.Module):
    """A layer that, unlike ReLU, gives another result the second time on what the first run has left."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1).mul_(0.5)


class CountsMicrobatches(nn.Module):
    """A layer whose output depends on a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = self.last + 0.5
        return (x * x) / (self.count + self.last)


def _shared_linear() -> list[nn.Module]:
    linear = nn.Linear(D, D)
    return [linear, nn.Tanh(), linear, nn.Dropout(0.5), linear]


MODELS: dict[str, Any] = {
    "skips": [
        pp.Stash("a", Keeps()),
        nn.Linear(D, D),
        pp.Stash("b", Keeps()),
        pp.Pop("a", Adds()),
        nn.Linear(D, D),
        pp.Pop("b", Adds()),
        nn.Linear(D, D),
    ],
    "one parameter three times": _shared_linear(),
    "written inputs": [nn.Linear(D, D), WritesToItsInput(), nn.Linear(D, D), WritesToItsInput(), nn.Tanh()],
    "buffers that matter": [nn.Linear(D, D), CountsMicrobatches(), nn.Linear(D, D), CountsMicrobatches()],
}


@pytest.mark.parametrize("recompute", [("every", 1), ("every", 2), "full"], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_that_make_recompute_hard(name: str, recompute: Any) -> None:
    """The plain loop of `pp.check` does not recompute."""
    for schedule in ("1f1b", "zb_h1"):
        model = pp.Model(MODELS[name], squared_error, sgd)
        options = {"stages": 2, "schedule": schedule, "recompute": recompute, "microbatches": 4}
        report = pp.check(model, BATCHES, **options)
        assert report.equal, report


def test_parameters_tied_across_stages_get_the_same_gradients() -> None:
    layers = [nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Dropout(0.3), nn.Linear(D, D)]
    model = pp.Model(layers, squared_error, sgd, tied=[("0.weight", "2.weight"), ("0.weight", "4.weight")])
    for schedule in ("gpipe", "zb_h1"):
        report = pp.check(model, BATCHES, stages=3, schedule=schedule, recompute="full", microbatches=4)
        assert report.equal, report


# What a stage holds between forward and backward.


class Records(nn.Module):
    """Remembers its outputs as long as somebody else holds them, and how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.runs = 0
        self.outputs: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        output = self.inner(x).sigmoid()  # which saves its result
        self.outputs.append(weakref.ref(output.untyped_storage()))
        return output

    @property
    def held(self) -> int:
        return sum(output() is not None for output in self.outputs)


def stage_of(layers: list[nn.Module], recompute: Any) -> Stage:
    return Stage(1, 0, layers, seed=0, recompute=recompute)


@pytest.mark.parametrize("defer_weights", [False, True])
@pytest.mark.parametrize(("recompute", "held"), [("none", 4), (("every", 2), 1), ("full", 0)], ids=str)
def test_only_inputs_of_segments_are_held_and_layers_run_twice(recompute: Any, held: int, defer_weights: bool) -> None:
    layers: list[Any] = [Records() for _ in range(4)]
    stage = stage_of(layers, recompute)
    for microbatch in (0, 1):
        output = stage.forward(Message(torch.randn(3, D), (True,)), 0, microbatch)
        gradient = torch.ones_like(output)
        del output
        # The first time a segment keeps a copy of its input: it might write to it.
        assert sum(layer.held for layer in layers) == (held if microbatch or recompute == "none" else 0)
        assert [layer.runs for layer in layers] == [2 * microbatch + 1 if recompute != "none" else microbatch + 1] * 4
        (at_input,) = stage.backward(microbatch, [gradient], defer_weights=defer_weights)
        assert at_input is not None
        if defer_weights:
            stage.backward_weights(microbatch)
        assert sum(layer.held for layer in layers) == 0
        assert all(layer.inner.weight.grad is not None for layer in layers)
        assert [layer.runs for layer in layers] == [2 * microbatch + 2 if recompute != "none" else microbatch + 1] * 4


def test_a_segments_buffers_count_each_microbatch_once() -> None:
    norm = nn.BatchNorm1d(D)
    stage = stage_of([norm, nn.Linear(D, D)], "full")
    buffers = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    outputs = [stage.forward(Message(torch.randn(3, D), (True,)), 0, microbatch) for microbatch in (0, 1)]
    before = [buffer.clone() for buffer in buffers if buffer is not None]
    for microbatch, output in enumerate(outputs):
        stage.backward(microbatch, [torch.ones_like(output)])
    after = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    assert all(a is b for a, b in zip(after, buffers, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True) if a is not None)
    assert norm.num_batches_tracked is not None and norm.num_batches_tracked.item() == 2


class Conjugates(nn.Module):
    """Hands on a complex tensor that is conjugated when it is read; in memory it is not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x.tanh()).conj()


class Imaginary(nn.Module):
    """Another one of that kind: negated when it is read."""

    def forward(self, z: Tensor) -> Tensor:
        return z.imag


class Multiplies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.exp()


@pytest.mark.parametrize("recompute", [lambda index, layer: isinstance(layer, Imaginary), ("every", 3)])
def test_what_is_conjugated_on_reading_stays_so(recompute: Any) -> None:
    model = pp.Model([nn.Linear(D, D), Conjugates(), Imaginary(), Multiplies()], squared_error, sgd)
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, stages=1, microbatches=4, recompute=recompute) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_an_operation_may_write_to_what_it_has_saved() -> None:
    # rrelu saves its noise before it draws it: the second run ended in between, with whatever was in that memory.
    model = pp.Model([nn.Linear(D, D), nn.RReLU(), nn.Linear(D, D)], squared_error, sgd)
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, stages=[2], microbatches=4, recompute="full") as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class Begins(nn.Module):
    """Has no average before its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Tensor | None
        self.register_buffer("average", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = x.detach().mean() if self.average is None else self.average * 0.5
        return x if self.average is None else x * (1 + self.average)


def test_a_buffer_that_the_first_forward_makes_is_made_once() -> None:
    model = pp.Model([nn.Linear(D, D), Begins(), nn.Linear(D, D)], squared_error, sgd)
    plain = PlainLoop(model, 1)
    with launched("thread", model, stages=1, microbatches=1, recompute="full") as pipeline:
        with pytest.raises(RuntimeError):
            pipeline.step((BATCHES[0][0], BATCHES[0][1][:, :1, :3]))
        pipeline.evaluate(BATCHES[:1])
        assert "1.average" not in pipeline.state_dict()  # neither a failed step nor an evaluation leaves one
        assert [pipeline.step(batch).loss for batch in BATCHES] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


# What cannot be recomputed is refused, never guessed.


def test_wrong_values_are_refused_with_what_is_allowed() -> None:
    for wrong in ("all", ("every", 0), ("every", 1.5), ("each", 2), True, 3):
        refuses(pp.PipelineError, r'recompute=.*"none", "full", \("every", k\)', recompute=wrong)


class Forgets(nn.Module):
    """Saves another number of tensors when it runs again, or other ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs % 2:
            return x.sin().cos() if self.how != "more" else F.dropout(x)
        return {"fewer": lambda: x.sin(), "smaller": lambda: x[:1].sin().cos(), "more": lambda: F.dropout(x).cos()}[
            self.how
        ]()


@pytest.mark.parametrize("how", ["fewer", "smaller", "more"])
def test_layers_that_do_something_else_the_second_time_are_named(how: str) -> None:
    model = pp.Model([nn.Linear(D, D), Forgets(how), nn.Linear(D, D), nn.Linear(D, D)], squared_error, sgd)
    options: dict[str, Any] = {"stages": [3], "microbatches": 1, "recompute": ("every", 2)}
    match = "layers 0 to 1: the second run differs"
    with launched("thread", model, **options) as pipeline, pytest.raises(pp.PipelineError, match=match):
        pipeline.step(BATCHES[0])


class WritesLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 3:  # in the second step
            self.seen += 1
        return x.sin()


def test_a_buffer_that_is_first_written_later_fails_one_step() -> None:
    model = pp.Model([nn.Linear(D, D), WritesLater()], squared_error, sgd)
    with launched("thread", model, stages=1, microbatches=1, recompute="full") as pipeline:
        pipeline.step(BATCHES[0])
        with pytest.raises(pp.PipelineError, match=r"layers 0 to 1: .*wrote to seen"):
            pipeline.step(BATCHES[0])
        pipeline.step(BATCHES[0])


class SavesAndPassesOn(nn.Module):
    """A function whose output is a view of its input, which it has saved: only its second value tells that."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.sin()


class WritesToTheFirst(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0].add_(1) + values[1]


def test_a_later_layer_that_writes_to_a_kept_input_is_found() -> None:
    layers = [nn.Linear(D, D), SavesAndPassesOn(), WritesToTheFirst()]
    model = pp.Model(layers, squared_error, sgd)
    options: dict[str, Any] = {"stages": 1, "microbatches": 1, "recompute": lambda index, layer: index == 1}
    match = r"layers 1 to 1: .* a later layer has changed their input in place"
    with launched("thread", model, **options) as pipeline:
        pipeline.step(BATCHES[0])  # in its first run a segment keeps a copy of its input
        with pytest.raises(pp.PipelineError, match=match):
            pipeline.step(BATCHES[0])


class Interpreted(nn.Module):
    """A function that ends in a RuntimeError, whatever the reason, as TorchScript's interpreter does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        try:
            y: Tensor = self.linear(x).tanh() * 0.5
        except BaseException as error:
            raise RuntimeError("The following operation failed in the TorchScript interpreter.") from error
        return y


def test_what_a_layer_makes_of_the_second_runs_early_end_is_no_error() -> None:
    """Steps with a scripted function (a fused GELU) and recompute failed with just that sentence."""
    model = pp.Model([pp.Layer(Interpreted) for _ in range(3)], squared_error, sgd)
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, stages=2, microbatches=4, recompute="full") as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class Slopes(nn.Module):
    """A layer that gives the slopes of a small network by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        slopes: Tensor = torch.func.grad(lambda value: self.inner(value).tanh().sum())(x)
        return slopes


def test_a_layer_whose_saved_tensors_torch_lets_nobody_have_is_told_what_to_do() -> None:
    """torch says only that one may open an issue."""
    model = pp.Model([nn.Linear(D, D), Slopes()], squared_error, sgd)
    with launched("thread", model, BATCHES, stages=1, microbatches=2) as pipeline:
        pipeline.step()
        with pytest.raises(RuntimeError, match=r"in layer 1\.Slopes[^$]*to profile it, let it call torch\.autograd"):
            pipeline.profile_memory()
        pipeline.step()
    with (
        launched("thread", model, BATCHES, stages=1, microbatches=2, recompute="full") as pipeline,
        pytest.raises(RuntimeError, match=r"in layer 1\.Slopes[^$]*leave the layer out of recompute"),
    ):
        pipeline.step()
