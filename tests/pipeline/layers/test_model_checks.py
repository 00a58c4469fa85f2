"""Modules and losses of which something would be lost are refused before anything is launched."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([4, 6])
WITHIN_S = 20.0


def freezes_a_row(kind: str) -> nn.Linear:
    linear = nn.Linear(D, D)
    if kind == "gradient":
        linear.weight.register_hook(lambda gradient: gradient * (torch.arange(D) > 0).unsqueeze(1))
    else:
        linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return linear


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_hooks_of_parameters_in_ready_made_layers_are_refused(kind: str) -> None:
    """Regression: copies have no hooks, so these silently never ran."""
    model = pp.Model([nn.Linear(D, D), freezes_a_row(kind)], squared_error, sgd)
    with pytest.raises(pp.PipelineError, match=r"'weight' of layer 1 has a hook, .* pp\.Layer"):
        pp.check(model, BATCHES)


def test_a_factory_registers_them_where_they_run() -> None:
    model = pp.Model([pp.Layer(nn.Linear, D, D), pp.Layer(freezes_a_row, "gradient")], squared_error, sgd)
    with launched("thread", model, BATCHES, stages=2, microbatches=2) as pipeline:
        before = pipeline.state_dict()["1.weight"]
        list(pipeline.steps())
        after = pipeline.state_dict()["1.weight"]
    assert [torch.equal(old, new) for old, new in zip(before, after, strict=True)] == [True] + [False] * (D - 1)


@pytest.mark.parametrize("stages", [2, [1]])
@pytest.mark.parametrize("layer", [nn.LazyLinear(D), pp.Layer(nn.LazyLinear, D)], ids=["module", "factory"])
def test_lazy_layers_are_refused_by_name(layer: Any, stages: Any) -> None:
    program = lp.Program("lazy")
    with pytest.raises((pp.PipelineError, lp.NodeError), match="LazyLinear, has a parameter without a shape"):
        pp.add_pipeline(program, pp.Model([nn.Linear(D, D), layer], squared_error, sgd), stages=stages)
        lp.launch(program, "thread").wait(WITHIN_S)


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(D, D)


def test_a_layer_that_is_made_under_inference_mode_is_refused_where_it_is_made() -> None:
    # It failed in the middle of the first step: "Inference tensors do not track version counter".
    layers = [nn.Linear(D, D), pp.Layer(made_for_inference)]
    with (
        pytest.raises(
            lp.LpPipeError, match=r"layer 1, Linear, has a tensor \(weight\) that was made under torch\.infer"
        ),
        launched("thread", pp.Model(layers, squared_error, sgd), stages=2),
    ):
        pass


class OfABuffer(nn.Module):
    """Writes to a buffer by a view of it, which is registered as well."""

    def __init__(self) -> None:
        super().__init__()
        means = torch.zeros(D)
        self.register_buffer("means", means)
        self.register_buffer("first", means[:2])

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.get_buffer("means")
        if self.training:
            first = self.get_buffer("first")
            first.mul_(0.5).add_(x.detach().flatten(0, -2).mean(0)[: len(first)])
        return y


class OfAParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("row", self.linear.weight.detach()[0])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) + self.get_buffer("row")
        return output


class OfATable(nn.Module):
    """Has a row of a table of which other layers have others."""

    def __init__(self, row: Tensor, *, writes: bool = False) -> None:
        super().__init__()
        self.register_buffer("row", row)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        row = self.get_buffer("row")
        if self.writes and self.training:
            row.mul_(0.5)
        return x * row


def of_one_table(*, writes: bool) -> list[nn.Module]:
    table = torch.ones(2 * D)
    return [OfATable(table[2 : D + 2]), OfATable(table[:D], writes=writes)]


def of_another_layer() -> list[nn.Module]:
    linear = nn.Linear(D, D)
    return [linear, OfATable(linear.bias.detach())]


@pytest.mark.parametrize(
    "layers", [[OfABuffer()], [OfAParameter()], of_one_table(writes=True), of_another_layer()], ids=str
)
def test_buffers_that_are_views_of_what_training_writes_to_are_refused_in_ready_made_layers(layers: Any) -> None:
    """Regression: between processes and stages each had memory of its own, and silently trained to other bits."""
    model = pp.Model([nn.Linear(D, D), *layers], squared_error, sgd)
    with pytest.raises(pp.PipelineError, match=r"buffer '\w+' of layer [12] shares memory .* pp\.Layer"):
        pp.check(model, BATCHES, stages=1)


def test_layers_of_any_stages_may_have_parts_of_one_constant_table() -> None:
    model = pp.Model([nn.Linear(D, D), *of_one_table(writes=False), nn.Linear(D, D)], squared_error, sgd)
    assert pp.check(model, BATCHES, stages=[2], microbatches=2).equal


def test_a_buffer_that_is_a_view_trains_where_a_factory_makes_it() -> None:
    model = pp.Model([pp.Layer(nn.Linear, D, D), pp.Layer(OfABuffer), pp.Layer(nn.Linear, D, D)], squared_error, sgd)
    plain = PlainLoop(model, 2)
    with launched("process", model, BATCHES, stages=2, microbatches=2) as pipeline:
        for batch in BATCHES:
            pipeline.step()
            plain.step(batch)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_one_buffer_under_two_names_is_no_view() -> None:
    layers: list[nn.Module] = [OfABuffer(), OfABuffer()]
    for layer in layers:
        layer.register_buffer("first", layer.get_buffer("means"))
    assert pp.check(pp.Model([nn.Linear(D, D), *layers], squared_error, sgd), BATCHES, stages=3)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_ready_made_scripted_layer_is_refused_and_one_of_a_factory_trains() -> None:
    """The stage ended in "can't optimize a non-leaf Tensor": torch's copies of such a module have no others."""

    def scripted() -> nn.Module:
        module: nn.Module = torch.jit.script(nn.Linear(D, D))
        return module

    with pytest.raises(pp.PipelineError, match=r"layer 1 has a scripted module, .* pp\.Layer\(lambda: torch\.jit"):
        pp.check(pp.Model([nn.Linear(D, D), scripted()], squared_error, sgd), BATCHES)
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(scripted)]
    assert pp.check(pp.Model(layers, squared_error, sgd), BATCHES, stages=2, microbatches=2)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"schedule": "zb_h1"}], ids=str)
def test_a_scripted_layer_with_buffers_trains(options: dict[str, Any]) -> None:
    """Regression: the first forward ended in "'OrderedDictWrapper' object has no attribute 'get'"."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(D)
            self.register_buffer("scale", torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.mul_(0.9)
            return self.norm(x.flatten(0, -2)).view_as(x) * self.scale

    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(lambda: torch.jit.script(Scales())), pp.Layer(nn.Linear, D, D)]
    assert pp.check(pp.Model(layers, squared_error, sgd), BATCHES, stages=2, microbatches=2, **options)


class Centers(nn.Module):
    """A loss with a parameter, and a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.ones(D))
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean((0, 1))
        return ((output - self.mean - target * self.center) ** 2).mean()


def test_a_loss_with_parameters_is_refused_and_one_with_buffers_stays_as_it_is() -> None:
    layers = [nn.Linear(D, D), nn.Linear(D, D)]
    loss = Centers()
    with pytest.raises(pp.PipelineError, match="the loss, Centers, has parameters"):
        pp.add_pipeline(lp.Program("refused"), pp.Model(layers, loss, sgd))
    loss.requires_grad_(False)
    model = pp.Model(layers, loss, sgd)
    assert pp.check(model, BATCHES, microbatches=2).equal
    with launched("thread", model, BATCHES, stages=2, microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.steps()]
        state = pipeline.state_dict()
    assert torch.equal(loss.mean, torch.zeros(D))  # not the user's own
    plain = PlainLoop(model, 2)
    assert losses == plain.steps(BATCHES)
    assert_same_state(state, plain.state_dict())


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), "1"])
def test_a_norm_to_clip_to_is_a_number_above_0(clip: Any) -> None:
    """A negative one turned all gradients around."""
    model = pp.Model([nn.Linear(D, D)], squared_error, sgd)
    with pytest.raises(pp.PipelineError, match=f"clip_grad_norm={clip!r}: give a number above 0"):
        pp.add_pipeline(lp.Program("refused"), model, stages=1, clip_grad_norm=clip)
