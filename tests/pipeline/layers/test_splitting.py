"""pp.split: a module that is no list of layers becomes one, and trains to the bits that it would have as a whole."""

import copy
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipe_split

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.piece import Definitions, Piece
from tests.pipeline.plain_loop import (
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    random_batches,
    sgd,
    squared_error,
)
from tests.pipeline.test_checkpoint import Transposed

pytestmark = pytest.mark.usefixtures("no_leaks")

WORDS, D = 11, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.linear = nn.Linear(D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        h = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(torch.relu_(self.linear(h * mask.unsqueeze(-1)))) * scale


class Language(nn.Module):
    """A mask and a skip for all blocks, a tied head that is defined first, an unsaved buffer, unused weights."""

    def __init__(self, dropout: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(D, WORDS, bias=False)
        self.words = nn.Embedding(WORDS, D)
        self.head.weight = self.words.weight
        self.positions = nn.Embedding(16, D)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("order", torch.arange(16), persistent=False)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        first = x = self.words(ids) + self.positions(self.order[: ids.shape[1]])
        with torch.no_grad():
            scale = self.scale * torch.tensor([2.0])
        for layer in self.layers:
            x = layer(x, mask, scale)
        return {"logits": self.head(x + first), "hidden": x * self.scale}


def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    found = nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
    return found + output["hidden"].square().mean()


def batch(samples: int, length: int, seed: int = 0) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (samples, length + 1), generator=generator)
    return (ids[:, :-1], (ids[:, 1:] > 2).float()), ids[:, 1:].contiguous()


BATCHES = [batch(10, 5), batch(7, 5, 1), batch(4, 9, 2), batch(10, 3, 3)]  # uneven, few, and of other lengths
POINTS = ["layers.0", "layers.2"]


class PlainModule(PlainLoop):
    """The plain loop over a whole module; names as users see them."""

    def __init__(self, model: pp.Model, microbatches: int, module: nn.Module) -> None:
        super().__init__(model, microbatches)
        self.layers, self.module = [module], module
        self.optimizer = model.optimizer(list(module.named_parameters()))

    def _forward(self, x: Any, microbatch: int) -> Any:
        with pp.step_rng(self.model.seed, 0, self.steps_done, microbatch):
            return self.module(*x) if isinstance(x, (tuple, list)) else self.module(x)

    def output(self, x: Any) -> Any:
        self.module.eval()
        with torch.no_grad():
            made = self._forward(x, 0)
        self.module.train()
        return made


def made(cls: type[nn.Module], *args: Any, **options: Any) -> Any:
    with pp.layer_rng(0, 0):
        return cls(*args, **options)


@pytest.fixture(scope="module")
def language() -> tuple[nn.Module, list[nn.Module]]:
    module = made(Language)
    return module, pp.split(module, batch(4, 6)[0], POINTS)


@pytest.fixture(scope="module")
def dropped() -> tuple[nn.Module, list[nn.Module]]:
    module = made(Language, 0.3)
    return module, pp.split(module, batch(4, 6)[0], POINTS)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same_output(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_split_module_trains_as_the_module_does_under_its_names(language: Any) -> None:
    module, layers = language
    model = pp.Model(layers, loss, adam)
    plain = PlainModule(model, 4, copy.deepcopy(module))
    with launched("thread", model, BATCHES, stages=3, microbatches=4) as pipeline:
        assert_same_state(pipeline.state_dict(), module.state_dict())
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        state = pipeline.state_dict()
        assert_same_state(state, plain.state_dict())
        assert_same_output(pipeline.forward(BATCHES[0][0]), plain.output(BATCHES[0][0]))
        assert_same_output(pipeline.forward(batch(1, 2)[0]), plain.output(batch(1, 2)[0]))
    made(Language).load_state_dict(state)


def test_gradients_are_clipped_by_the_norm_that_the_whole_module_has(language: Any) -> None:
    # Squares add up in the order of the module's parameters, not of the pieces: its head is defined first, used last.
    module, layers = language
    model = pp.Model(layers, loss, adam)
    plain = PlainModule(model, 4, copy.deepcopy(module))
    plain.clip_grad_norm = 0.1
    with launched("thread", model, BATCHES, stages=2, microbatches=4, clip_grad_norm=0.1) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    report = pp.check(model, BATCHES, stages=2, microbatches=4, clip_grad_norm=0.1)
    assert report.equal, str(report)


CUTS: list[dict[str, Any]] = [
    {"stages": 1},
    {"stages": 2, "schedule": "gpipe"},
    {"stages": [2], "schedule": "zb_h1"},
    {"stages": [1, 2], "schedule": "interleaved", "chunks": 3},
]


@pytest.mark.parametrize("options", CUTS, ids=str)
def test_dropout_of_a_piece_draws_as_that_of_a_layer(options: dict[str, Any], dropped: Any) -> None:
    _, layers = dropped
    model = pp.Model(layers, loss, adam, seed=3)
    report = pp.check(model, BATCHES[:3], microbatches=4, **options)
    assert report.equal, str(report)


def test_evaluation_is_without_dropout_and_leaves_batchnorm_alone(dropped: Any) -> None:
    module, layers = dropped
    plain = PlainModule(pp.Model(layers, loss, adam), 4, copy.deepcopy(module))
    with launched("thread", plain.model, BATCHES, stages=2, microbatches=4) as pipeline:
        before = pipeline.fingerprint()
        assert pipeline.evaluate(BATCHES[:1]).loss == plain.evaluate(BATCHES[0])
        assert_same_output(pipeline.forward(BATCHES[1][0]), plain.output(BATCHES[1][0]))
        assert pipeline.fingerprint() == before
        pipeline.step()
        assert pipeline.fingerprint() != before
    assert module.training and layers[1].training


def test_state_dicts_and_checkpoints_go_both_ways_whatever_the_cut(language: Any, tmp_path: Path) -> None:
    module, layers = language
    model = pp.Model(layers, loss, adam)
    with launched("process", model, BATCHES, stages=2, microbatches=2) as first:
        list(first.steps(2))
        first.save(tmp_path)
        losses, fingerprint = [result.loss for result in first.steps(2)], first.fingerprint()
    with launched("thread", model, BATCHES, stages=3, microbatches=2) as second:
        second.load(tmp_path)
        assert [result.loss for result in second.steps(2)] == losses
        assert second.fingerprint() == fingerprint
        # Two values for the tied weights: the last in the module's own order stays, as in load_state_dict.
        state = {name: torch.full_like(value, index) for index, (name, value) in enumerate(module.state_dict().items())}
        second.load_state_dict(state)
        plain = made(Language)
        plain.load_state_dict(state)
        assert_same_state(second.state_dict(), plain.state_dict())
        with pytest.raises(pp.PipelineError, match=r"missing \['words.weight'\], unknown \[\]"):
            second.load_state_dict({name: value for name, value in state.items() if name != "words.weight"})


def test_the_state_of_a_split_module_is_of_its_modules_versions() -> None:
    # They took it for an old one, and changed their weights in silence.
    module = made(nn.Sequential, Transposed(), nn.Linear(D, D))
    model = pp.Model(pp.split(module, torch.randn(4, D), ["1"]), squared_error, sgd)
    with launched("thread", model, random_batches([4], D), stages=2) as pipeline:
        pipeline.step()
        state = pipeline.state_dict()
    module.load_state_dict(state)
    assert_same_state(module.state_dict(), state)


def test_pieces_can_be_copied_and_pickled(language: Any) -> None:
    module, layers = language
    value = batch(3, 4)[0]
    module.train()
    with torch.no_grad():
        want = copy.deepcopy(module)(*value)
        got: Any = value
        for layer in cloudpickle.loads(cloudpickle.dumps(copy.deepcopy(layers))):
            got = layer(got)
    assert_same_output(got, want)


class MakesFreeTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            bias = torch.ones(1, x.shape[1], 1)
        y: Tensor = self.other(self.linear(x) + torch.zeros(x.shape[1], D) + bias)
        return y


def test_a_piece_that_makes_tensors_of_free_sizes_travels() -> None:
    # T5's relative positions: torch unpickles a graph by tracing it, and its `zeros([1, heads, n, n])` of traced sizes
    # ended each stage that was a process ("Expected a value of type 'List[int]' for argument 'size'").
    layers = pp.split(made(MakesFreeTensors), torch.randn(2, 3, D), ["other"])
    there = cloudpickle.loads(cloudpickle.dumps(layers))
    back = copy.deepcopy(cloudpickle.loads(cloudpickle.dumps(there)))
    x = torch.randn(4, 5, D)
    assert torch.equal(pp.Sequential(back)(x), pp.Sequential(layers)(x))


class Calls(nn.Module):
    """Says itself where it is to be cut; takes keywords, and one thing that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, other: Tensor | None = None, twice: bool = False) -> Tensor:
        y = self.one(x).tanh()
        pipe_split()
        y = self.two(y) + (x if other is None else other)
        return y + y if twice else y


def test_a_module_that_calls_pipe_split_is_cut_there() -> None:
    module = made(Calls)
    x = torch.randn(5, D)
    layers = pp.split(module, x)
    assert [list(layer.state_dict()) for layer in layers] == [["one.weight", "one.bias"], ["two.weight", "two.bias"]]
    assert torch.equal(layers[1](layers[0](x)), module(x))
    model = pp.Model(layers, squared_error, adam)
    plain = PlainModule(model, 3, copy.deepcopy(module))
    with launched("thread", model, stages=2, microbatches=3) as pipeline:
        assert pipeline.step((x, x)).loss == plain.step((x, x))
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_keyword_arguments_and_constants() -> None:
    module, x = made(Calls), torch.randn(5, D)
    first, second = pp.split(module, {"x": x, "other": x + 1, "twice": True})
    assert torch.equal(second(first({"twice": True, "other": x, "x": x})), module(x, x, True))
    with pytest.raises(pp.PipelineError, match="split for the constant True, not False"):
        first({"x": x, "other": x, "twice": False})
    with pytest.raises(pp.PipelineError, match="split for inputs such as"):
        first(x)


def test_ends_of_submodules_are_split_points_too() -> None:
    module, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), torch.randn(3, D)
    layers = pp.split(module, (x,), {"0": "end", "2": "beginning"})
    assert [list(layer.state_dict()) for layer in layers] == [["0.weight", "0.bias"], [], ["2.weight", "2.bias"]]
    torchs = pp.split(module, (x,), {"0": SplitPoint.END, "2": SplitPoint.BEGINNING})
    assert [list(layer.state_dict()) for layer in torchs] == [list(layer.state_dict()) for layer in layers]
    assert "forward" not in vars(module[0]) and "_orig_forward" not in vars(module[2])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum() > 0 else -y


class BranchesWithoutSelf(Branches):
    def forward(me, x: Tensor) -> Tensor:
        return me.linear(x) if x.sum() > 0 else me.other(x)


class BranchesByCond(Branches):
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.tanh())


class WritesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        view = y[:, :2]
        pipe_split()
        y.add_(1.0)  # changes the view, too, unless the two have come in a message
        return y.sum() + view.sum()


class Cache:
    """A container that torch does not know."""


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.other(self.linear(x)), "past_key_values": Cache()}


class CountsSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.view(4, 2, 4).flatten(1))
        return y


@pytest.mark.parametrize(
    ("module", "points", "message"),
    [
        (Language, ["layer.0"], "split point 'layer.0': Language has no submodule .* the nearest is 'layers.0'"),
        (Language, {"layers.0": None}, "None must be 'beginning' or 'end'"),
        (Language, {"layers.0": "middle"}, "'middle' must be 'beginning' or 'end'"),
        (Language, "layers.0", "give a list of names"),
        (Language, 2, "split_points=2: give a list of names"),
        (Language, ["layers"], r"'layers' is a ModuleList, which has no forward to call: name .* such as 'layers.0'"),
        (Branches, ["linear"], r"torch.export cannot take Branches in train mode: .*branches .*depend on values"),
        # torch named a line of ours, and the one that branches only below a hundred lines of graph.
        (Branches, ["linear"], r"\(at test_splitting.py:\d+, return y if y.sum\(\) > 0 else -y\)"),
        (BranchesWithoutSelf, ["linear"], r"\(at test_splitting.py:\d+, return me.linear\(x\) if x.sum\(\) > 0"),
        (BranchesByCond, ["linear"], "torch.export cannot take BranchesByCond .*torch.cond"),
        (CountsSamples, ["linear"], r"torch.export cannot take CountsSamples .*a number of samples"),
        (Remembers, ["other"], r"torch.export cannot take Remembers .*Cache.* not a known type. .*use_cache=False"),
        (WritesInPlace, (), "'linear' and 'slice_[12]' share memory .* that a later piece writes to in place"),
        (nn.Sequential(nn.Linear(D, D)), ["0"], "piece 0 of 2 is empty"),
        (nn.Sequential(nn.Linear(D, D)), [], "Sequential has no split points"),
        (Skips, ["unused"], r"split points \['unused'\]: forward calls none of them"),
        (Skips, ["linear", "unused"], r"split points .* make 2 pieces only: forward does not call all of them"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_split_is_refused(module: Any, points: Any, message: str) -> None:
    module = made(module) if isinstance(module, type) else module
    inputs = batch(4, 6)[0] if isinstance(module, Language) else torch.randn(4, D)
    with pytest.raises(pp.PipelineError, match=message) as caught:
        pp.split(module, inputs, points)
    assert ("torch.export" in str(caught.value)) == (caught.value.__cause__ is not None)
    assert module.training and not any("_orig_forward" in vars(part) for part in module.modules())


def test_sizes_that_the_module_fixes_are_checked(language: Any) -> None:
    _, layers = language
    with pytest.raises(pp.PipelineError, match=r"split for inputs of shape \[.*\], not \[3, 4\]"):
        layers[0]((torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 4)))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.enter(x)
        x = x.masked_fill(mask, 0.0) if mask.dtype == torch.bool else x + mask
        y: Tensor = self.leave(x)
        return y


def test_the_dtypes_of_inputs_are_checked() -> None:
    # A mask to add took the branch of the example's, which was one of bools (or the other way round).
    first, _ = pp.split(made(Masked), (torch.randn(4, D), torch.randn(4, D)), ["leave"])
    with pytest.raises(pp.PipelineError, match=r"split for a tensor of torch\.float32, not of torch\.bool"):
        first((torch.randn(4, D), torch.randn(4, D) > 0))


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x, h = self.enter(x), torch.zeros(1, D)
        for token in range(x.shape[1]):
            h = torch.tanh(h + x[:, token])
        y: Tensor = self.leave(h)
        return y


class Scales(Recurrence):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.leave(self.enter(x) * math.sqrt(x.shape[1]))
        return y


@pytest.mark.parametrize("module", [Recurrence, Scales])
def test_a_size_that_forward_has_made_a_number_is_checked(module: type[nn.Module]) -> None:
    # The graph has as many rounds as the example had tokens; longer batches trained on their first tokens only.
    whole = made(module)
    first, second = pp.split(whole, torch.randn(4, 5, D), ["leave"])
    x = torch.randn(3, 5, D)
    assert torch.equal(second(first(x)), whole(x))
    with pytest.raises(pp.PipelineError, match=rf"split for inputs of shape \['s\d+', 5, {D}\], not \[3, 6, {D}\]"):
        first(torch.randn(3, 6, D))


class Pooled(nn.Module):
    """A module whose pooling logs at length, since torch cannot tell which sizes it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, D, 7, stride=2, padding=3), nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.leave(nn.functional.max_pool2d(self.enter(x), 3, stride=2, ceil_mode=True))
        return y


@pytest.mark.parametrize("fixed_sizes", [True, False])
def test_sizes_are_left_open_unless_they_are_fixed(fixed_sizes: bool) -> None:
    # A Swin transformer took 106 s, in which torch.export reasoned about sizes that no batch ever had.
    whole = made(Pooled)
    first, second = pp.split(whole, torch.randn(4, 3, 64, 64), ["leave"], fixed_sizes=fixed_sizes)
    x = torch.randn(3, 3, 64, 64)
    assert torch.equal(second(first(x)), whole(x))
    other = torch.randn(3, 3, 96, 96)
    if fixed_sizes:
        with pytest.raises(pp.PipelineError, match=r"shape \['s\d+', 3, 64, 64\], not \[3, 3, 96, 96\]: .*fixed_sizes"):
            first(other)
    else:
        assert torch.equal(second(first(other)), whole(other))


def test_torch_is_quiet_about_what_it_cannot_say_of_sizes(caplog: pytest.LogCaptureFixture) -> None:
    # 300 lines of sympy's tracebacks for a GoogLeNet that was split as it should be.
    torchs = logging.getLogger("torch")  # it hands nothing on to the root's handlers
    torchs.addHandler(caplog.handler)
    try:
        pp.split(made(Pooled), torch.randn(4, 3, 64, 64), ["leave"])
    finally:
        torchs.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class NormedQuery(nn.Module):
    """Asks for dtypes as Qwen's norms, T5's masks and many others do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.leave = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        h = query.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        with torch.no_grad():
            scale = torch.full_like(h, 3.0).type_as(query)
        y: Tensor = self.leave(h.to(query.dtype) * scale) + torch.finfo(query.dtype).eps
        return y


@pytest.mark.parametrize(("precision", "other"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_module_that_asks_for_dtypes_is_split_under_the_precision_that_it_trains_in(
    precision: str, other: str
) -> None:
    # What forward had made of the example's dtypes was in the graph, whatever the autocast of the pipeline gave.
    module, batches = made(NormedQuery), random_batches([6, 5])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        layers = cloudpickle.loads(cloudpickle.dumps(pp.split(module, batches[0][0], ["leave"])))  # as to a process
    model = pp.Model(layers, squared_error, adam)
    plain = PlainModule(model, 2, copy.deepcopy(module))
    plain.precision = precision
    with launched("thread", model, batches, stages=2, microbatches=2, precision=precision) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    how = "under" if other == "bf16" else "without"
    with (
        launched("thread", model, batches, stages=2, microbatches=2, precision=other) as pipeline,
        pytest.raises(
            pp.PipelineError,
            match=rf"test_splitting.py:\d+ asks for the dtype .*pp.split\(\) {how} torch.autocast\(.*bfloat16\)",
        ),
    ):
        pipeline.step()


class Padding(nn.Module):
    """Branches on both sizes, as windowed attention and causal masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(WORDS, D), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        if ids.shape[1] % 2:
            x = nn.functional.pad(x, (0, 0, 0, 1))
        if ids.shape[0] > 8:
            x = x * 2
        return self.linear(x.unflatten(1, (-1, 2)).sum(2)).mean(1)


def test_inputs_that_would_take_another_branch_are_refused() -> None:
    # The graph has the example's branch only; it used to run for all sizes, and trained otherwise than the module.
    module = made(Padding)
    first, second = cloudpickle.loads(
        cloudpickle.dumps(pp.split(module, torch.zeros(4, 6, dtype=torch.long), ["linear"]))
    )
    for sizes in ((4, 6), (1, 6), (8, 2)):
        ids = torch.randint(WORDS, sizes)
        assert torch.equal(second(first(ids)), module(ids))
    with pytest.raises(
        pp.PipelineError, match=r"test_splitting.py:\d+ branches on the inputs' sizes.*Mod.*\[\[4, 7\]\]"
    ):
        first(torch.zeros(4, 7, dtype=torch.long))
    with pytest.raises(pp.PipelineError, match=r"split for the branch where s\d+ <= 8, .*\[\[9, 6\]\]"):
        first(torch.zeros(9, 6, dtype=torch.long))


class Averages(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("average", torch.ones(D))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.how == "no_grad":
            with torch.no_grad():
                self.average.view(2, -1)[0].mul_(0.9)
        elif self.how == "slice":
            self.average[:2] = y.detach().mean(0)[:2]
        elif self.how == "view":
            self.average.view(2, -1)[0].mul_(0.9)
        elif self.how == "view_of_no_grad":
            with torch.no_grad():
                halves = self.average.view(2, -1)
            with torch.no_grad():
                halves[0].mul_(0.9)
        elif self.how == "view_of_an_earlier_piece":
            average = self.average.view(-1)
            z = self.two(y * average.clone()) + average.clone()
            average.mul_(0.9)
            return z
        return self.two(y * self.average) + self.average


class AveragesInNoBuffer(Averages):
    def __init__(self) -> None:
        super().__init__("")
        del self.average
        self.average = torch.ones(D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.one(x)
        self.average.mul_(0.9).add_(y.detach().mean(0))  # to be looked at after the training
        z: Tensor = self.two(y)
        return z


def test_a_write_to_what_is_no_buffer_is_refused() -> None:
    with pytest.raises(
        pp.PipelineError, match="forward writes to 'average', a tensor of the module's that is no buffe"
    ):
        pp.split(AveragesInNoBuffer(), torch.randn(4, D), ["two"])


@pytest.mark.parametrize("how", ["no_grad", "slice", "view", "view_of_no_grad", "view_of_an_earlier_piece"])
def test_a_buffer_that_forward_writes_to_in_any_way_stays_in_one_stage(how: str) -> None:
    # It used to count as constant unless an operation wrote to all of it outside of no_grad(): each stage had a copy.
    module, x = Averages(how), torch.randn(4, D)
    layers = pp.split(module, x, ["two"])
    model = pp.Model(layers, squared_error, adam)
    refused = pytest.raises(pp.PipelineError, match=r"share a buffer \(1.average\) that training writes to")
    with refused, launched("thread", model, stages=2, microbatches=2) as pipeline:
        pipeline.step((x, x))
    plain = PlainModule(model, 2, copy.deepcopy(module))
    with launched("thread", model, stages=1, microbatches=2) as pipeline:
        assert pipeline.step((x, x)).loss == plain.step((x, x))
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.words(ids)).flatten(0, 1), labels.flatten())


def test_an_example_may_have_one_tensor_twice() -> None:
    # labels=ids in the example was one input for torch.export: the labels of the batches were never looked at.
    module, ids, labels = made(Labelled), torch.randint(WORDS, (4, 6)), torch.randint(WORDS, (4, 6))
    first, second = pp.split(module, {"ids": ids, "labels": ids}, ["head"])
    assert torch.equal(second(first({"ids": ids, "labels": labels})), module(ids, labels))


class MakesTensors(nn.Module):
    """Beside its parameters it computes with a constant, and with what it makes where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scales = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = torch.zeros(4, device=x.device) + 1
        x = self.first(x) * self.scales + shift
        return self.second(x) + torch.arange(x.shape[1], device=x.device)[:, None]


def test_pieces_make_their_tensors_where_they_are_moved() -> None:
    """torch.export writes the example's device down, and stages on GPUs met tensors of the CPU. Here: torch's meta."""
    module, x = MakesTensors(), torch.randn(3, 5, 4)
    pieces = pp.split(module, x, ["second"])
    value = x.to("meta")
    for piece in copy.deepcopy(pieces):
        value = piece.to("meta")(value)
    assert value.shape == x.shape and value.is_meta
    for piece in pieces:  # the copies' graphs were their own
        x = piece(x)
    assert x.is_cpu


class Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(Rounds.apply(self.one(x)))  # type: ignore[no-untyped-call, no-any-return]


class Hooked(Skips):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y.tanh()


@torch.library.custom_op("lp_pipe_tests::rounds", mutates_args=())
def rounds(x: Tensor) -> Tensor:
    return x.round()


rounds.register_fake(torch.empty_like)
rounds.register_autograd(lambda ctx, gradient: gradient)


class QuantisedByOp(Quantised):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(rounds(self.one(x)))
        return y


def test_a_custom_op_keeps_its_gradient() -> None:
    module, x = made(QuantisedByOp), torch.randn(3, D)
    first, second = pp.split(copy.deepcopy(module), x, ["two"])
    second(first(x)).sum().backward()
    module(x).sum().backward()
    # A node that unpickles the piece has to import what defines the operation.
    assert isinstance(first, Piece) and isinstance(second, Piece)
    assert first.parts[True].definitions == (__name__,) and second.parts[True].definitions == ()
    found, wanted = first.get_parameter("layer.one.weight").grad, module.get_parameter("one.weight").grad
    assert found is not None and wanted is not None and torch.equal(found, wanted) and wanted.any()


def test_modules_that_define_operations_are_imported_where_a_piece_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lp_pipe_test_operations.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    payload = cloudpickle.dumps(Definitions(("lp_pipe_test_operations",)))
    assert "lp_pipe_test_operations" not in sys.modules
    assert cloudpickle.loads(payload) == ("lp_pipe_test_operations",)
    assert sys.modules.pop("lp_pipe_test_operations")


def test_an_operation_of_the_script_itself_is_refused_before_it_travels() -> None:
    of_the_script = Definitions(("__main__",))
    with pytest.raises(pp.PipelineError, match="define it in a module that the script imports"):
        cloudpickle.dumps(of_the_script)
    assert copy.deepcopy(of_the_script) == ("__main__",)  # stages that are threads have it


def _with_backward_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    module[1].register_full_backward_hook(lambda *_: None)
    return module


class Reentrant(Skips):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.utils.checkpoint.checkpoint(self.unused, x.requires_grad_(), use_reentrant=True)
        return self.linear(y)


class Halves(Skips):
    """A compression of what autograd saves, as of activations."""

    def __init__(self, pack: Any = lambda saved: saved / 2) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved):
            y: Tensor = self.unused(x).tanh()
        z: Tensor = self.linear(y)
        return z


class QuantisedInput(Quantised):
    """The input of a split module may come from a layer that is trained."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(Rounds.apply(x)))
        return y


@pytest.mark.parametrize(
    ("make", "point", "what"),
    [
        (Quantised, "two", "the backward of the torch.autograd.Function Rounds"),
        (lambda: Quantised().requires_grad_(False), "two", "the backward of the torch.autograd.Function Rounds"),
        (QuantisedInput, "two", "the backward of the torch.autograd.Function Rounds"),
        (Halves, "linear", "what torch.autograd.graph.saved_tensors_hooks make of the tensors"),
        (lambda: Halves(Tensor.trunc), "linear", "what torch.autograd.graph.saved_tensors_hooks make of the tensors"),
        (Hooked, "linear", r"a hook of a tensor \(Tensor.register_hook\)"),
        (_with_backward_hook, "1", "a backward hook of '1'"),
        (Reentrant, "linear", "the backward of the torch.autograd.Function CheckpointFunction"),
    ],
)
def test_gradients_that_the_graph_would_not_have_are_refused(make: Any, point: str, what: str) -> None:
    # torch.export writes down what forward does; a gradient of one's own went missing without a word.
    module = make()
    before = len(module._forward_hooks)
    with pytest.raises(pp.PipelineError, match=f"torch.export would leave out {what}, and the pieces would train"):
        pp.split(module, torch.randn(3, D), [point])
    assert len(module._forward_hooks) == before


class Teaches(Quantised):
    """Rounds what has no gradient to begin with."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = Rounds.apply(self.one(x))
        y: Tensor = self.two(self.one(x) - target)
        return y


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_gets_pieces_that_have_those_of_the_module(context: Any) -> None:
    # torch.export wrote down the module as it computes there: its own no_grad() blocks had gradients in training.
    module, quantised, x = made(Teaches), made(Quantised), torch.randn(3, D)
    twin = copy.deepcopy(module)
    with context():
        layers = pp.split(twin, x, ["two"])
        with pytest.raises(pp.PipelineError, match="leave out the backward of"):
            pp.split(quantised, x, ["two"])
    pp.Sequential(layers)(x).sum().backward()
    module(x).sum().backward()
    gradients = {name: parameter.grad for name, parameter in pp.Sequential(layers).named_parameters()}
    assert gradients
    for name, parameter in module.named_parameters():
        index = 0 if name.startswith("one") else 1
        found = gradients[f"{index}.{name}"]
        assert found is not None and parameter.grad is not None and torch.equal(found, parameter.grad), name


def test_pieces_in_another_order_or_number_are_refused(language: Any) -> None:
    _, layers = language
    with pytest.raises(pp.PipelineError, match="a piece of a split module is missing among the layers"):
        pp.add_pipeline(_program(), pp.Model(layers[:2], loss, adam), stages=2)
    again = pp.split(nn.Sequential(nn.Linear(D, D), nn.Tanh()), torch.randn(2, D), ["1"])
    with pytest.raises(pp.PipelineError, match="is also a name in another layer"):
        pp.add_pipeline(_program(), pp.Model([nn.Linear(D, D), *again], loss, adam), stages=2)
    with pytest.raises(pp.PipelineError, match=r"takes \d values .*, not"):
        layers[1](batch(4, 6)[0][0])


def test_a_piece_among_other_layers_keeps_its_names() -> None:
    module, x = made(Calls), torch.randn(6, D)
    model = pp.Model([nn.Tanh(), *pp.split(module, x), nn.Linear(D, D)], squared_error, adam)
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        pipeline.step((x, x))
        names = ["one.weight", "one.bias", "two.weight", "two.bias", "3.weight", "3.bias"]
        assert list(pipeline.state_dict()) == names
    assert all(isinstance(layer, Piece) for layer in model.layers[1:3])


def _program() -> Any:
    import lp_pipe as lp

    return lp.Program("refused")
