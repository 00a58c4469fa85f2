"""Models that are no plain chain of trained layers on floats, to the same bits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    T,
    adam,
    assert_same_state,
    launched,
    layers_of,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([6, 6, 6, 6])


class Passes(nn.Module):
    """Has a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, value: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"a": self.left(value[0]), "b": self.right(value[1])}


class TakesDict(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return value["a"] * value["b"]


class SendsThreeTimes(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, x, x]


class TakesThree(nn.Module):
    """Three gradients meet: the order in which they are added up shows in the last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, values: list[Tensor]) -> Tensor:
        assert values[0] is values[1] is values[2]
        one, two, three = (layer(value) for layer, value in zip(self.layers, values, strict=True))
        return one.tanh() + two.sigmoid() + three.sin()


class Attends(nn.Module):
    """Hands the memory on that every layer looks at, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, memory = value
        return (x + self.key(memory)).tanh() + self.value(memory * x), memory


class Opens(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.sigmoid()


class Closes(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0]


class HandsOnAParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.linear = nn.Parameter(torch.ones(D)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.prompt, self.prompt[:1]


class TakesAParameter(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, prompt, scale = value
        return x * prompt + scale


class Checkpointed(nn.Module):
    """Draws its dropout mask again in the backward, from torch's generator as it was in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.4), nn.GELU(), nn.Linear(D, D), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False) if self.training else self.block(x)


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient + 0.1 * torch.randn_like(gradient)


class NoisyGradient(nn.Module):
    """Draws in the backward, as stochastic rounding does."""

    def forward(self, x: Tensor) -> Any:
        return _Noise.apply(x)  # type: ignore[no-untyped-call]


def _dict_error(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return squared_error(output, target["y"]) * target["scale"].mean()


def _frozen() -> nn.Module:
    return nn.Linear(D, D).requires_grad_(False)


def _tokens(count: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randint(0, 11, (count, 5, T + 1), generator=generator)
    return [(row[:, :-1], row[:, 1:]) for row in numbers]


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _pairs(count: int) -> list[tuple[Any, Any]]:
    return [
        ((x, y), {"y": x + y, "scale": torch.full((len(x),), float(n + 1))})
        for n, (x, y) in enumerate(random_batches([6] * count))
    ]


LINEAR = pp.Layer(nn.Linear, D, D)
MODELS: dict[str, tuple[list[pp.Layer], Any, list[tuple[Any, Any]]]] = {
    "one tensor three times": ([LINEAR, pp.Layer(SendsThreeTimes), pp.Layer(TakesThree)], squared_error, BATCHES),
    "a memory for all stages": (
        [pp.Layer(Opens), pp.Layer(Attends), pp.Layer(Attends), pp.Layer(Attends), pp.Layer(Closes)],
        squared_error,
        BATCHES,
    ),
    "token ids": ([pp.Layer(nn.Embedding, 11, D), LINEAR, pp.Layer(nn.Linear, D, 11)], _cross_entropy, _tokens(4)),
    "tuple and dict": ([pp.Layer(TakesTwo), pp.Layer(TakesDict), LINEAR], _dict_error, _pairs(4)),
    "a parameter that is not used": ([LINEAR, pp.Layer(Passes), LINEAR], squared_error, BATCHES),
    # A leaf of the graph even in an evaluation, which failed.
    "a parameter among the outputs": (
        [LINEAR, pp.Layer(HandsOnAParameter), pp.Layer(TakesAParameter), LINEAR],
        squared_error,
        BATCHES,
    ),
    "stages without parameters": ([pp.Layer(nn.Tanh), LINEAR, pp.Layer(nn.ReLU)], squared_error, BATCHES),
    "frozen in front": ([pp.Layer(_frozen), LINEAR, LINEAR], squared_error, BATCHES),
    "frozen in the middle": ([LINEAR, pp.Layer(_frozen), LINEAR], squared_error, BATCHES),
    "frozen behind": ([LINEAR, LINEAR, pp.Layer(_frozen)], squared_error, BATCHES),
}


def _trainable_only(parameters: Any) -> torch.optim.Optimizer:
    """Return only trainable parameters, as many users do; torch refuses an empty list."""
    return torch.optim.AdamW([p for _, p in parameters if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("optimizer", [adam, _trainable_only])
@pytest.mark.parametrize("name", MODELS)
def test_irregular_models_train_to_the_same_bits(name: str, optimizer: Any) -> None:
    layers, loss, batches = MODELS[name]
    model = pp.Model(layers, loss, optimizer)
    plain = PlainLoop(model, 4, clip_grad_norm=0.5)
    with launched("thread", model, batches, stages=3, microbatches=4, clip_grad_norm=0.5) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
        assert torch.equal(pipeline.forward(batches[0][0]), plain.output(batches[0][0]))


@pytest.mark.parametrize("weight", ["samples", "one", lambda target: (target > 0).sum()], ids=["samples", "one", "fn"])
def test_a_microbatch_weighs_what_the_model_says(weight: Any) -> None:
    model = model_with_everything(loss_weight=weight)
    plain = PlainLoop(model, 4)
    batches = random_batches([10, 7])
    with launched("thread", model, batches, stages=2, microbatches=4) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@dataclass
class Output:
    hidden: Tensor


@dataclass(slots=True)
class Compact:
    hidden: Tensor


class Box(dict[str, Any]):
    """A dict with attributes, as users write them: torch's pytree knows plain dicts only."""

    __getattr__ = dict.__getitem__


class Several:
    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)

    @property
    def hidden(self) -> Tensor:
        return self.parts[0]["it"]


WRAPPERS: dict[str, Any] = {
    "Output 'hidden'": Output,
    "Compact 'hidden'": Compact,
    "Box 'hidden'": lambda x: Box(hidden=x, mask=None),
    "Several 'parts.0.it'": lambda x: Several({"it": x}, "name"),
}


class Wraps(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return WRAPPERS[self.kind](x)


class Unwraps(nn.Module):
    def forward(self, output: Any) -> Tensor:
        hidden: Tensor = output.hidden
        return hidden


class Neighbours(nn.Module):
    """A layer of a graph network: the adjacency is the same for all samples, and sparse."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("adjacency", adjacency, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.stack([torch.sparse.mm(self.adjacency, sample) for sample in x])))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize(
    "options", [{"schedule": "zb_h1"}, {"recompute": "full"}, {"replicas": 2, "on_nan": "skip"}], ids=str
)
def test_layers_may_have_sparse_buffers(layout: torch.layout, options: dict[str, Any]) -> None:
    """Torch compares no sparse tensors, and copies none of a compressed layout: not even a step could be made."""
    adjacency = torch.ones(T, T).triu().to_sparse(layout=layout)
    model = pp.Model([Neighbours(adjacency) for _ in range(3)], squared_error, sgd)
    report = pp.check(model, BATCHES[:2], stages=2, microbatches=4, **options)
    assert report, str(report)


def test_what_is_told_of_a_pipeline_with_sparse_buffers(tmp_path: Path) -> None:
    layer = Neighbours(torch.ones(T, T).triu().to_sparse())
    layer.register_buffer("kept", torch.eye(T).to_sparse())
    model = pp.Model([layer, nn.Linear(D, D)], squared_error, sgd)
    with launched("thread", model, stages=2, microbatches=4) as pipeline:
        before, loss = pipeline.fingerprint(), pipeline.evaluate(BATCHES).loss
        pipeline.load_state_dict(pipeline.state_dict())
        assert pipeline.fingerprint() == before and pipeline.evaluate(BATCHES).loss == loss
        assert pipeline.profile_memory(1, BATCHES[0])[0].buffer_bytes > T * T * 4
        for keep in (pipeline.save, pipeline.export):
            with pytest.raises(pp.PipelineError, match=r"0\.kept is .*sparse_coo.* persistent=False"):
                keep(tmp_path / "model")
        with pytest.raises(pp.PipelineError, match=r"0\.kept is .*sparse_coo.* or mirror .* persistent=False"):
            pipeline.mirror()
    assert pp.profile(model, *BATCHES[0]).layers[0].activation_bytes > 0


@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_object_that_hides_tensors_crosses_no_cut(kind: str) -> None:
    """Regression: its tensors went along as data, so the stages before the cut were silently not trained."""
    model = pp.Model([LINEAR, pp.Layer(Wraps, kind), pp.Layer(Unwraps), LINEAR], squared_error, adam)
    name, tensor = kind.split()
    with launched("thread", model, BATCHES, stages=[2], microbatches=1) as pipeline:
        with pytest.raises(pp.PipelineError, match=rf"holds a {name}, whose tensor {tensor} would lose its gradient"):
            pipeline.step()
        pipeline.evaluate(BATCHES)  # nothing is lost here
    plain = PlainLoop(model, 2)
    with launched("thread", model, BATCHES, stages=[1, 3], microbatches=2) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_layers_that_checkpoint_draw_the_same_while_other_threads_draw(schedule: str) -> None:
    """Regression: they set torch's generator in the backward, in the middle of another stage's forward."""
    model = pp.Model([pp.Layer(Checkpointed) for _ in range(6)], squared_error, sgd)
    plain = PlainLoop(model, 6)
    with launched("thread", model, BATCHES, stages=3, schedule=schedule, microbatches=6) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class Thaws(nn.Module):
    """Is frozen for the first three micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        return self.linear.requires_grad_(bool(self.seen > 3))(x)


def test_a_layer_may_thaw_in_a_stage_that_has_an_optimizer_and_is_refused_in_one_that_has_none() -> None:
    """Regression: without an optimizer its gradients were dropped, step by step."""
    model = pp.Model([LINEAR, pp.Layer(Thaws), LINEAR], squared_error, adam)
    plain = PlainLoop(model, 2)
    with launched("thread", model, BATCHES, stages=[1], microbatches=2) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    with launched("thread", model, BATCHES, stages=[1, 2], microbatches=2) as pipeline:
        pipeline.step()
        before = pipeline.fingerprint()
        with pytest.raises(pp.PipelineError, match=r"1\.linear\.weight, .* no optimizer.* frozen"):
            pipeline.step()
        assert pipeline.fingerprint() == before


class Hides(nn.Module):
    """A part of its input, in place: what comes behind is to guess it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x[..., 0] = 0
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("fed", [True, False])
@pytest.mark.parametrize(
    "options", [{"stages": 1}, {"stages": 2}, {"stages": 1, "schedule": "zbv"}, {"stages": 1, "replicas": 2}], ids=str
)
def test_a_target_stays_as_it_was_given_though_it_is_the_input_too(options: dict[str, Any], fed: bool) -> None:
    """Regression: in one stage a layer wrote to it by chance, by the place of the message in memory."""
    model = pp.Model([Hides(), nn.Linear(D, D)], squared_error, sgd)
    batches = [(x, x) for x, _ in BATCHES]
    plain = PlainLoop(model, 2)
    with launched("thread", model, batches if fed else None, microbatches=2, **options) as pipeline:
        for x, _ in batches:
            loss = pipeline.step(None if fed else (x, x)).loss
            expected = plain.step((x.clone(), x))
            assert loss == expected or "replicas" in options
            assert loss == pytest.approx(expected)
            assert pipeline.evaluate([(x, x)]).loss == pipeline.evaluate([(x, x.clone())]).loss
    report = pp.check(model, [(x.clone(),) * 2 for x, _ in batches], microbatches=2, **options)
    assert report, report


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_backward_that_draws_draws_the_same_in_every_mode_and_after_a_resume(schedule: str, tmp_path: Path) -> None:
    """Regression: it drew from the process's generator, in any state."""
    model = pp.Model([LINEAR, pp.Layer(NoisyGradient), LINEAR], squared_error, adam)
    options: dict[str, Any] = {"stages": [1], "microbatches": 3, "schedule": schedule}
    with launched("thread", model, BATCHES, **options) as pipeline:
        list(pipeline.steps(2))
        pipeline.save(tmp_path)
        list(pipeline.steps())
        found = pipeline.fingerprint()
    torch.manual_seed(1)
    with launched("process", model, BATCHES, **options) as pipeline:
        list(pipeline.steps())
        assert pipeline.fingerprint() == found
        pipeline.load(tmp_path)
        list(pipeline.steps())
        assert pipeline.fingerprint() == found


def test_with_one_stage_a_backward_that_draws_is_that_of_a_plain_loop() -> None:
    model = pp.Model([LINEAR, pp.Layer(NoisyGradient), LINEAR], squared_error, sgd)
    plain = nn.Sequential(*layers_of(model))
    optimizer = sgd(list(plain.named_parameters()))
    x, y = BATCHES[0]
    for j, (part, target) in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
        loss = squared_error(plain(part), target) * len(part) / len(x)
        with pp.step_rng(model.seed, 0, 0, -1 - j):
            loss.backward()
    optimizer.step()
    with launched("thread", model, BATCHES, stages=1, microbatches=3) as pipeline:
        pipeline.step()
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert pp.check(model, BATCHES, stages=1, microbatches=3).equal
