"""Parameters to which forwards write: fine where one stage has them, refused where copies would differ."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([8, 6, 8])


class Tokens(nn.Module):
    """Makes the rows that it looks up shorter, in its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, D, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table((x.detach().abs() * 5).long().sum(2) % 11)
        return x + rows


class Words(nn.Module):
    """A layer whose backward needs the rows as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, max_norm=1.0)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        mixed: Tensor = self.linear(torch.tanh(rows * rows))
        return mixed


class Decays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.shift.mul_(0.9)
        return x + self.shift


class Follows(nn.Module):
    """A parameter that gets other memory in each forward, as MoCo's key encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(D))
        self.slow = nn.Parameter(torch.ones(D), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.slow.data = self.slow.data * 0.9 + self.shift.data * 0.1
        return x + self.shift * self.slow


class Normalizes(nn.Module):
    """A layer whose scale fits the first micro-batch, as that of a flow's ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("is_initialized", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_initialized:
            self.scale.data.copy_(1 / (x.detach().std((0, 1)) + 0.1))
            self.is_initialized.fill_(True)
        return x * self.scale


def _model(layer: type[nn.Module], **options: Any) -> pp.Model:
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(layer), pp.Layer(nn.Linear, D, D), pp.Layer(layer)]
    return pp.Model(layers, squared_error, sgd, **options)


@pytest.mark.parametrize("options", [{"schedule": "gpipe"}, {"schedule": "zb_h1"}, {"recompute": "full"}], ids=str)
def test_a_table_with_a_largest_norm_trains_to_the_same_bits(options: dict[str, Any]) -> None:
    plain = PlainLoop(_model(Tokens), 4)
    with launched("thread", _model(Tokens), BATCHES, stages=[2], microbatches=4, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "recompute",
    ["full", ("every", 1), ("every", 2), lambda index, _: index < 2],
    ids=["full", "every layer", "every two", "chosen"],
)
def test_a_table_with_a_largest_norm_is_not_looked_up_twice(recompute: Any) -> None:
    """The second run found rows that later micro-batches had made shorter again, by a last bit, and did so itself."""
    layers = [pp.Layer(Words), pp.Layer(nn.Linear, 16, 16), pp.Layer(nn.Linear, 16, 16)]
    model = pp.Model(layers, squared_error, lambda parameters: torch.optim.SGD(parameters, lr=5.0))
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randint(50, (64, 5), generator=generator), torch.randn(64, 5, 16, generator=generator)) for _ in range(8)
    ]
    plain = PlainLoop(model, 8)
    with launched(
        "thread", model, batches, stages=2, microbatches=8, schedule="gpipe", recompute=recompute
    ) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_evaluation_leaves_the_table_alone() -> None:
    """Regression: the rows that it looked up stayed shorter, as if the evaluation had trained them."""
    batches = random_batches([16, 16])
    with launched("thread", _model(Tokens), batches[:1], stages=2, microbatches=4) as pipeline:
        pipeline.step()
        before = pipeline.fingerprint()
        loss = pipeline.evaluate(batches).loss
        pipeline.forward(batches[1][0])
        assert pipeline.fingerprint() == before
        assert pipeline.evaluate(batches).loss == loss


class LooksUp(nn.Module):
    """A layer like `Tokens`, by a function: nothing tells that it is one before it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(11, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding((x.detach().abs() * 5).long().sum(2) % 11, self.weight, max_norm=1.0)


class Clips(nn.Module):
    """Keeps its weights small, without autograd's knowledge."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((D,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-1, 1)
        return x + self.weight


WRITERS = [LooksUp, Clips, Decays]


@pytest.mark.parametrize("layer", WRITERS)
def test_evaluation_leaves_parameters_alone_to_which_a_forward_writes(layer: type[nn.Module]) -> None:
    # They stayed changed, as if the evaluation had trained them.
    plain = PlainLoop(_model(layer), 4)
    with launched("thread", _model(layer), stages=2, microbatches=4, schedule="gpipe") as pipeline:
        for batch in BATCHES:
            before = pipeline.fingerprint()
            loss = pipeline.evaluate(BATCHES).loss
            pipeline.forward(BATCHES[1][0])
            assert pipeline.evaluate(BATCHES).loss == loss
            assert pipeline.fingerprint() == before
            assert pipeline.step(batch).loss == plain.step(batch)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class Fails(nn.Module):
    """A layer that fails for one batch, once all stages before have looked up their rows."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise ArithmeticError("no good")
        return x


def failing(layer: type[nn.Module] = Tokens) -> pp.Model:
    layers = [pp.Layer(layer), pp.Layer(nn.Linear, D, D), pp.Layer(Fails), pp.Layer(layer), pp.Layer(nn.Linear, D, D)]
    return pp.Model(layers, squared_error, sgd)


@pytest.mark.parametrize("layer", [Tokens, *WRITERS])
def test_a_step_that_fails_leaves_parameters_as_they_were(layer: type[nn.Module]) -> None:
    """Rows stayed shorter: the next steps were no longer those of a loop that had left the batch out."""
    good, bad = random_batches([16, 16]), random_batches([12])[0]
    plain = PlainLoop(failing(layer), 4)
    with launched("thread", failing(layer), stages=2, microbatches=4, schedule="gpipe") as pipeline:
        for batch in good:
            before = pipeline.fingerprint()
            with pytest.raises(ArithmeticError, match="no good"):
                pipeline.step(bad)
            assert pipeline.fingerprint() == before
            assert pipeline.step(batch).loss == plain.step(batch)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("layer", [Tokens, *WRITERS])
def test_so_does_one_that_is_skipped_because_its_loss_is_no_number(layer: type[nn.Module]) -> None:
    good, bad = random_batches([16, 16]), random_batches([16, 16, 16])[0]
    plain = PlainLoop(_model(layer), 4)
    with launched("thread", _model(layer), stages=2, microbatches=4, on_nan="skip") as pipeline:
        for batch in good:
            assert pipeline.step((bad[0], bad[1] * float("nan"))).skipped
            assert pipeline.step(batch).loss == plain.step(batch)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class BorrowsItsTable(nn.Module):
    """The table is torch's own, and does not know how it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding((x.detach().abs() * 5).long().sum(2) % 11, self.table.weight, max_norm=1.0)


def test_what_an_evaluation_has_changed_and_cannot_put_back_is_named_until_weights_are_loaded(
    tmp_path: Path,
) -> None:
    model = _model(BorrowsItsTable)
    with launched("thread", model, stages=1, microbatches=4) as pipeline:
        before = pipeline.state_dict()
        named = r"parameter '1\.table\.weight'.* evaluation"
        with pytest.raises(pp.PipelineError, match=named):
            pipeline.evaluate(BATCHES)
        with pytest.raises(pp.PipelineError, match=named):
            pipeline.save(tmp_path)
        with pytest.raises(pp.PipelineError, match=named):
            pipeline.step(BATCHES[0])
        pipeline.load_state_dict(before)
        pipeline.evaluate(BATCHES)
        assert_same_state(pipeline.state_dict(), before)


def test_what_a_step_has_shown_is_put_back_after_evaluations() -> None:
    model = _model(BorrowsItsTable)
    plain = PlainLoop(model, 4)
    with launched("thread", model, stages=2, microbatches=4) as pipeline:
        for batch in BATCHES:
            assert pipeline.step(batch).loss == plain.step(batch)
            pipeline.evaluate(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


REFUSED: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any], str]] = {
    "replicas": (Tokens, {}, {"replicas": (1, 2)}, r"'3.table.weight', .* the stage's other replicas have it"),
    "tied": (Tokens, {"tied": (("1.table.weight", "3.table.weight"),)}, {}, "'1.table.weight', .* stages 0 and 1"),
    "recompute": (Decays, {}, {"recompute": "full"}, r"layers (0 to 1|2 to 3): cannot be recomputed, because a forw"),
    # It went unnoticed that they have other memory now.
    "replicas, other memory": (Follows, {}, {"replicas": (1, 2)}, r"'3.slow', .* the stage's other replicas have it"),
    # In silence, too: a write to .data counts as none.
    "replicas, .data": (Normalizes, {}, {"replicas": (1, 2)}, r"'3.scale', .* the stage's other replicas have it"),
    "tied, .data": (Normalizes, {"tied": (("1.scale", "3.scale"),)}, {}, r"'1.scale', .* stages 0 and 1 have it both"),
    "recompute, other memory": (
        Follows,
        {},
        {"recompute": "full"},
        r"layers (0 to 1|2 to 3): cannot be recomputed, because a f",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_copies_that_would_differ_are_refused(name: str) -> None:
    # Each replica, or stage that has the weight, wrote to its own: in silence they had different parameters.
    layer, of_model, options, match = REFUSED[name]
    with (
        launched("thread", _model(layer, **of_model), stages=[2], microbatches=4, **options) as pipeline,
        pytest.raises(pp.PipelineError, match=match),
    ):
        pipeline.evaluate(BATCHES)
        pipeline.step(BATCHES[0])


class Averages(nn.Module):
    """Follows its own Linear by a frozen copy of it, as a mean teacher does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.mean = copy.deepcopy(self.linear).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.weight.lerp_(self.linear.weight, 0.1)
        with torch.no_grad():
            taught = self.mean(x)
        return self.linear(x) + taught


@pytest.mark.parametrize("layer", [Tokens, Averages, *WRITERS])
def test_asynchronous_schedules_refuse_writers_because_they_keep_older_weights(layer: type[nn.Module]) -> None:
    # Written were whichever versions were in use: others with step() than with steps(), and with evaluate between.
    options: dict[str, Any] = {"stages": [2], "schedule": "pipedream", "microbatches": 4}
    with (
        launched("thread", _model(layer), BATCHES, **options) as pipeline,
        pytest.raises(
            pp.PipelineError, match=r"writes to parameter '1\..*an asynchronous schedule keeps older weights"
        ),
    ):
        list(pipeline.steps())


def test_but_not_of_the_last_stage_which_keeps_none() -> None:
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(Averages)]
    model = pp.Model(layers, squared_error, sgd)
    trained = []
    for ways in (lambda client: list(client.steps()), lambda client: [client.step() for _ in BATCHES]):
        with launched("thread", model, BATCHES, stages=2, schedule="pipedream", microbatches=4) as pipeline:
            ways(pipeline)
            trained.append(pipeline.state_dict())
    assert_same_state(*trained)
