"""A pipeline trains the same parameters and buffers, to the bit, as the plain loop in one process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import (
    D,
    Feeder,
    PlainLoop,
    T,
    adam,
    assert_same_state,
    launched,
    launched_many,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

# 10 in 4 makes slices of 3, 3, 3 and 1; 3 in 4 makes three; 2 in 3 or 4 has fewer micro-batches than stages.
BATCHES = random_batches([10, 3, 2, 12])


def test_training_in_stages_equals_the_plain_loop() -> None:
    layers = [nn.Linear(D, D), nn.Dropout(0.5), nn.ReLU(), nn.Linear(D, D)]
    model = pp.Model(layers, squared_error, adam)
    program = lp.Program("train")
    feeder = program.add_node(lp.CourierNode(Feeder, BATCHES), label="feeder")
    handle = pp.add_pipeline(program, model, stages=2, schedule="1f1b", microbatches=4, inputs=feeder)
    with lp.launch(program, "thread") as run:
        pipeline = run.client(handle)
        losses = [result.loss for result in pipeline.steps()]
        trained = pipeline.state_dict()

    plain = nn.Sequential(*layers)  # the pipeline has trained copies of these
    optimizer = adam(plain.parameters())
    expected = []
    for step, (inputs, targets) in enumerate(BATCHES):
        total = 0.0
        for microbatch, (x, y) in enumerate(zip(inputs.chunk(4), targets.chunk(4), strict=True)):
            for index, layer in enumerate(plain):
                with pp.step_rng(0, index, step, microbatch):
                    x = layer(x)
            weight = len(y) / len(targets)
            loss = squared_error(x, y)
            total += loss.item() * weight
            (loss * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)

    assert losses == expected
    assert all(torch.equal(trained[name], value) for name, value in plain.state_dict().items())


STAGES_AND_SCHEDULES: list[dict[str, Any]] = [
    *({"stages": stages, "schedule": name} for stages in (1, 2, 3, 4) for name in ("gpipe", "1f1b")),
    {"stages": 1, "schedule": "interleaved", "chunks": 2},
    {"stages": 2, "schedule": "interleaved", "chunks": 2},
    {"stages": 3, "schedule": "interleaved", "chunks": 2},
    {"stages": 2, "schedule": "looped_bfs", "chunks": 2},
    {"stages": 4, "schedule": "looped_bfs", "chunks": 2},
    *({"stages": stages, "schedule": name} for stages in (1, 2, 3, 4) for name in ("zb_h1", "zbv")),
]


def _name(options: dict[str, Any]) -> str:
    return f"{options['schedule']}-{options['stages']}"


def _assert_trains_like(plain: PlainLoop, pipeline: pp.PipelineClient) -> None:
    results = list(pipeline.steps())
    assert [result.loss for result in results] == plain.steps(BATCHES)
    assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("microbatches", "clip"), [(1, None), (3, 0.1), (4, None), (4, 0.1)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("options", STAGES_AND_SCHEDULES, ids=_name)
def test_every_schedule_and_cut_trains_to_the_same_bits(
    options: dict[str, Any], microbatches: int, clip: float | None
) -> None:
    model = model_with_everything()
    with launched("thread", model, BATCHES, microbatches=microbatches, clip_grad_norm=clip, **options) as pipeline:
        _assert_trains_like(PlainLoop(model, microbatches, clip), pipeline)


@pytest.mark.parametrize("clip", [0.1, float("inf"), None])
def test_a_step_tells_the_norm_of_its_gradients_before_clipping(clip: float | None) -> None:
    """An infinite limit only measures."""
    model = model_with_everything()
    plain = PlainLoop(model, 4, clip)
    with launched("thread", model, BATCHES, stages=3, microbatches=4, clip_grad_norm=clip) as pipeline:
        for batch in BATCHES:
            plain.step(batch)
            assert pipeline.step().grad_norm == plain.grad_norm
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_dualpipev_trains_to_the_same_bits(stages: int, more: int) -> None:
    """The schedule wants two micro-batches a stage, but some batches have fewer samples."""
    model, microbatches = model_with_everything(), 2 * stages + more
    options = {"stages": stages, "schedule": "dualpipev", "microbatches": microbatches, "clip_grad_norm": 0.1}
    with launched("thread", model, BATCHES, **options) as pipeline:
        _assert_trains_like(PlainLoop(model, microbatches, 0.1), pipeline)


def test_all_synchronous_schedules_leave_the_same_fingerprint() -> None:
    model = model_with_everything()
    fingerprints = set()
    for schedule in set(pp.schedules()) - {"forward", "pipedream", "pipedream_2bw"}:
        with launched("thread", model, BATCHES, stages=3, schedule=schedule, microbatches=6) as pipeline:
            list(pipeline.steps())
            fingerprints.add(pipeline.fingerprint())
    assert len(fingerprints) == 1


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_stages_may_be_on_any_worker(mode: str) -> None:
    """Put the first stage on the last worker, and two that do not follow one another on one."""
    order = {0: 2, 1: 1, 2: 0, 3: 1}
    stages_of = [[stage for stage in order if order[stage] == worker] for worker in range(3)]
    rows = [
        ",".join(f"{stage}F{m}" for stage in stages for m in range(4))
        + ","
        + ",".join(f"{stage}{op}{m}" for op in "IW" for stage in stages[::-1] for m in range(4))
        for stages in stages_of
    ]
    schedule = pp.Schedule.from_csv("\n".join(rows), "scattered")
    assert schedule.placement == (2, 1, 0, 1)
    model, batches = model_with_everything(), random_batches([10, 12, 8])
    plain = PlainLoop(model, 4, 0.1)
    with launched(mode, model, batches, stages=3, schedule=schedule, microbatches=4, clip_grad_norm=0.1) as pipeline:
        assert pipeline.evaluate(batches).loss == pytest.approx(
            sum(plain.evaluate(b) * len(b[0]) for b in batches) / 30
        )
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_stages_in_processes_train_to_the_same_bits() -> None:
    model = model_with_everything()
    chosen: list[tuple[dict[str, Any], int, float | None]] = [
        ({"stages": 2, "schedule": "1f1b"}, 4, 0.1),
        ({"stages": 3, "schedule": "gpipe"}, 3, None),
        ({"stages": 4, "schedule": "1f1b"}, 3, None),
        ({"stages": 2, "schedule": "interleaved", "chunks": 2}, 4, 0.1),
        ({"stages": 2, "schedule": "looped_bfs", "chunks": 2}, 1, None),
        ({"stages": 3, "schedule": "zb_h1"}, 4, 0.1),
        ({"stages": 2, "schedule": "zbv"}, 4, 0.1),
        ({"stages": 2, "schedule": "dualpipev"}, 5, None),
    ]
    pipelines = [
        (model, BATCHES, {**options, "microbatches": m, "clip_grad_norm": clip}) for options, m, clip in chosen
    ]
    with launched_many("process", pipelines) as clients:
        for client, (_, microbatches, clip) in zip(clients, chosen, strict=True):
            _assert_trains_like(PlainLoop(model, microbatches, clip), client)


def test_batches_that_the_client_brings_train_to_the_same_bits() -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 4)
    with launched("thread", model, stages=3, microbatches=4) as pipeline:
        assert [pipeline.step(batch).loss for batch in BATCHES] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def noisy_error(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that draws, as of a diffusion, or of a VAE's sample."""
    return squared_error(output, target + torch.randn_like(target))


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_loss_draws_as_a_layer_behind_the_last_one(mode: str) -> None:
    model = pp.Model([nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)], noisy_error, adam)
    plain = PlainLoop(model, 3)
    losses = plain.steps(BATCHES)
    with launched_many(mode, [(model, BATCHES, {"stages": n, "microbatches": 3}) for n in (1, 3)]) as pipelines:
        for pipeline in pipelines:
            assert [result.loss for result in pipeline.steps()] == losses
            assert_same_state(pipeline.state_dict(), plain.state_dict())
            assert pipeline.evaluate(BATCHES[:1]).loss == pipeline.evaluate(BATCHES[:1]).loss


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_batches_may_be_slices_of_a_data_set(mode: str) -> None:
    """Rows of 5 features begin at any multiple of 20 bytes, where a product has other bits than at one of 16 bytes."""
    [(inputs, targets)] = random_batches([40], 5)
    batches = list(zip(inputs.split(7), targets.split(7), strict=True))
    model = pp.Model([pp.Layer(nn.Linear, 5, 7), pp.Layer(nn.Linear, 7, 5)], squared_error, sgd)
    plain = PlainLoop(model, 3)
    losses = plain.steps(batches)
    with launched_many(mode, [(model, batches, {"microbatches": 3}), (model, None, {"microbatches": 3})]) as clients:
        assert [result.loss for result in clients[0].steps()] == losses  # each batch from a feeder
        assert [clients[1].step(batch).loss for batch in batches] == losses
        for pipeline in clients:
            assert_same_state(pipeline.state_dict(), plain.state_dict())
            assert all(torch.equal(pipeline.forward(value), plain.output(value)) for value, _ in batches)
    assert pp.check(model, batches, stages=2, microbatches=3)


# What crosses a cut may be a view of other memory. Kernels sum strided and dense tensors in different orders, so the
# next stage must see the tensor as the plain loop's next layer does. Sizes at which vectorised kernels show it.

B_, T_, D_ = 8, 37, 33


class Apply(nn.Module):
    """A function of its input, as a layer without parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def apply(function: Callable[[Any], Any]) -> pp.Layer:
    return pp.Layer(Apply, function)


LINEAR = pp.Layer(nn.Linear, D_, D_)
# Each: the layers before the cut, the layers behind it; [B, T, D] -> [B, anything].
VIEWS_AT_A_CUT: dict[str, tuple[list[pp.Layer], list[pp.Layer]]] = {
    "transposed": ([LINEAR, apply(lambda x: x.transpose(1, 2))], [pp.Layer(nn.Linear, T_, T_)]),
    "transposed, then summed": ([LINEAR, apply(lambda x: x.transpose(1, 2))], [apply(lambda x: (x * x.exp()).sum(2))]),
    "transposed, then normalised": ([LINEAR, apply(lambda x: x.transpose(1, 2))], [pp.Layer(nn.BatchNorm1d, D_)]),
    "sliced": ([LINEAR, apply(lambda x: x[:, 1:])], [LINEAR]),
    "sliced in features": ([LINEAR, apply(lambda x: x[..., 1:])], [pp.Layer(nn.Linear, D_ - 1, D_)]),
    "sliced, then summed": ([LINEAR, apply(lambda x: x[..., 3:])], [apply(lambda x: x.softmax(2).sum(1))]),
    "every second": ([LINEAR, apply(lambda x: x[:, :, ::2])], [pp.Layer(nn.Linear, (D_ + 1) // 2, D_)]),
    "one token": ([LINEAR, apply(lambda x: x[:, -1])], [LINEAR]),
    "expanded": ([LINEAR, apply(lambda x: x.mean(1, keepdim=True).expand(-1, T_, -1))], [LINEAR]),
    "expanded, then summed": (
        [LINEAR, apply(lambda x: x.mean(1, keepdim=True).expand(-1, T_, -1))],
        [apply(lambda x: x.exp().sum(1))],
    ),
    "mean behind the cut": ([LINEAR, LINEAR], [apply(lambda x: x.mean(1)), LINEAR]),
    "mean over features behind the cut": ([LINEAR, LINEAR], [apply(lambda x: x.mean(2))]),
    "sum of all behind the cut": ([LINEAR, LINEAR], [apply(lambda x: x.sum((1, 2)))]),
    "norm before an expanded gradient": ([LINEAR, pp.Layer(nn.LayerNorm, D_)], [apply(lambda x: x.mean(1))]),
    "slice behind the cut": ([LINEAR, LINEAR], [apply(lambda x: x[:, 1:, 1:]), apply(lambda x: x * x)]),
    "transpose behind the cut": ([LINEAR, LINEAR], [apply(lambda x: x.transpose(1, 2)), pp.Layer(nn.Linear, T_, 5)]),
    "channels last": (
        [apply(lambda x: x.unsqueeze(1).contiguous(memory_format=torch.channels_last)), pp.Layer(nn.Conv2d, 1, 8, 3)],
        [pp.Layer(nn.BatchNorm2d, 8), pp.Layer(nn.Conv2d, 8, 4, 3)],
    ),
}
VIEW_BATCHES = random_batches([B_, B_], T_, D_)


def _sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output**2).mean() + 0 * target.mean()


def _view_model(name: str) -> tuple[pp.Model, dict[str, Any]]:
    before, after = VIEWS_AT_A_CUT[name]
    return pp.Model([*before, *after], _sum_of_squares, sgd), {"stages": [len(before)], "microbatches": 2}


@pytest.mark.parametrize("name", VIEWS_AT_A_CUT)
def test_views_at_a_cut_keep_their_bits(name: str) -> None:
    model, options = _view_model(name)
    plain = PlainLoop(model, 2)
    with launched("thread", model, VIEW_BATCHES, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(VIEW_BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_views_at_a_cut_keep_their_bits_between_processes() -> None:
    names = [
        "transposed, then summed",
        "sliced in features",
        "expanded, then summed",
        "mean behind the cut",
        "norm before an expanded gradient",
        "channels last",
    ]
    differing = []
    with launched_many("process", [(model, VIEW_BATCHES, o) for model, o in map(_view_model, names)]) as clients:
        for name, client in zip(names, clients, strict=True):
            plain = PlainLoop(_view_model(name)[0], 2)
            losses = [result.loss for result in client.steps()]
            same = losses == plain.steps(VIEW_BATCHES)
            state, want = client.state_dict(), plain.state_dict()
            if not same or not all(torch.equal(state[key], want[key]) for key in want):
                differing.append(name)
    assert not differing


@pytest.mark.parametrize(
    "mode_and_workers", [("thread", 3), ("thread", 1), pytest.param(("process", 3), marks=pytest.mark.slow)], ids=str
)
def test_an_in_place_layer_behind_a_cut_leaves_the_sender_alone(mode_and_workers: tuple[str, int]) -> None:
    """Tanh and Sigmoid save their output for the backward; the next stage must write to a copy of it."""
    mode, workers = mode_and_workers

    def layers(inplace: bool) -> list[pp.Layer]:
        relu = pp.Layer(nn.ReLU, inplace=inplace)
        linear = pp.Layer(nn.Linear, D, D)
        return [linear, pp.Layer(nn.Tanh), relu, linear, pp.Layer(nn.Sigmoid), relu, linear]

    # In one process torch refuses this model ("modified by an inplace operation"), so compare with its twin.
    plain = PlainLoop(pp.Model(layers(inplace=False), squared_error, sgd), 4)
    model = pp.Model(layers(inplace=True), squared_error, sgd)
    schedule = {"schedule": "1f1b"} if workers == 3 else {"schedule": "looped_bfs", "chunks": 3}
    with launched(mode, model, BATCHES, stages=[2, 5], microbatches=4, **schedule) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("options", [{}, {"schedule": "zb_h1"}], ids=str)
def test_gradients_pass_a_view_that_is_written_to_behind_a_cut_in_its_layout(options: dict[str, Any]) -> None:
    # Linear's output is a view, and autograd gives what writes to a view a gradient in the layout of its base. Behind a
    # cut the input was none: the gradient stayed transposed, where SiLU's backward computes without vectors.
    linear, transpose = pp.Layer(nn.Linear, D, D), apply(lambda x: x.transpose(0, 1))
    layers = [linear, pp.Layer(nn.SiLU, inplace=True), transpose, linear, transpose]
    model, batches = pp.Model(layers, squared_error, sgd), random_batches([12, 7, 13, 5, 12, 7, 13, 5])
    plain = PlainLoop(model, 1)
    with launched("thread", model, batches, stages=[1], microbatches=1, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


# A batch may be a view, too: images that are stored by pixel, sequences with time in front.
LAYOUTS: dict[str, tuple[Tensor, list[pp.Layer]]] = {
    "transposed": (
        random_batches([B_], D_, T_)[0][0].transpose(1, 2),
        [apply(lambda x: (x * x.exp()).sum(2)), pp.Layer(nn.Linear, T_, 5)],
    ),
    "channels last": (
        random_batches([B_], 3, 17, 19)[0][0].contiguous(memory_format=torch.channels_last),
        [pp.Layer(nn.Conv2d, 3, 8, 3), pp.Layer(nn.BatchNorm2d, 8), pp.Layer(nn.Conv2d, 8, 4, 3)],
    ),
    # From the first element on: a slice that begins in the middle of a cache line is not put there again.
    "sliced": (random_batches([B_], T_, D_)[0][0][..., :-1], [pp.Layer(nn.Linear, D_ - 1, 5)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_batch_keeps_its_layout_on_the_way_to_the_first_stage(name: str) -> None:
    value, layers = LAYOUTS[name]
    batches = [(value, torch.ones(B_))] * 3
    model = pp.Model(layers, _sum_of_squares, sgd)
    plain = PlainLoop(model, 2)
    with launched("thread", model, batches, stages=1, microbatches=2) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


# Any model, cut anywhere.


class UsesItsInputTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class OpensABranch(nn.Module):
    """Returns a tuple; `ClosesTheBranch` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x, {"skip": self.inner(x).sigmoid(), "scale": 2.0}


class ClosesTheBranch(nn.Module):
    def forward(self, value: tuple[Tensor, dict[str, Any]]) -> Tensor:
        x, branch = value
        return x * branch["skip"] * branch["scale"]


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.requires_grad_(False)


def _conjugate(x: Tensor) -> Tensor:
    return torch.complex(x.float(), x.float().tanh()).conj()


class SwapsTwice(nn.Module):
    """A layer whose gradient is laid out with the second dimension in front."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.transpose(0, 1))
        return y.transpose(0, 1)


class KeepsAverage(nn.Module):
    """Computes with a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Tensor
        self.register_buffer("average", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x * (1 + self.average)


# Each entry keeps [B, T, D]; the second of a pair follows the first, possibly behind a cut.
PIECES: dict[str, list[pp.Layer]] = {
    "linear": [pp.Layer(nn.Linear, D, D)],
    "layer norm": [pp.Layer(nn.LayerNorm, D)],
    "batch norm": [pp.Layer(nn.BatchNorm1d, T)],
    "dropout": [pp.Layer(nn.Dropout, 0.3)],
    "in-place relu": [pp.Layer(nn.Linear, D, D), pp.Layer(nn.ReLU, inplace=True)],
    "gelu": [pp.Layer(nn.GELU)],
    "tanh": [pp.Layer(nn.Tanh)],
    "twice": [pp.Layer(UsesItsInputTwice)],
    "branch": [pp.Layer(OpensABranch), pp.Layer(ClosesTheBranch)],
    "identity": [pp.Layer(nn.Identity)],
    "view": [apply(lambda x: x.transpose(0, 1).transpose(0, 1))],
    "frozen": [pp.Layer(Frozen)],
    "in-place silu": [pp.Layer(nn.Linear, D, D), pp.Layer(nn.SiLU, inplace=True), pp.Layer(SwapsTwice)],
    "noise": [pp.Layer(nn.RReLU)],
    "conjugate": [apply(_conjugate), apply(lambda z: z.imag), apply(lambda x: x * x.exp())],
    "double": [apply(lambda x: x.double()), pp.Layer(nn.Linear, D, D, dtype=torch.float64), apply(lambda x: x.float())],
    "views": [apply(lambda x: (x, x[..., :1], x.argmax(2), None)), apply(lambda v: v[0] * v[2][..., None] + v[1])],
    "average": [pp.Layer(KeepsAverage)],
}


SINGLE_CHUNK = ["gpipe", "1f1b", "zb_h1"]
TWO_CHUNKS = ["interleaved", "looped_bfs", "zbv", "dualpipev"]


@st.composite
def models(draw: st.DrawFn) -> list[pp.Layer]:
    names = draw(st.lists(st.sampled_from(sorted(PIECES)), min_size=2, max_size=6))
    return [layer for name in names for layer in PIECES[name]] + PIECES["linear"]  # something to train, at the end


@st.composite
def cuts(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """Workers, schedule, micro-batches and recomputation: what may be others after a resume."""
    chunks = draw(st.sampled_from([1, 1, 2]))
    workers = draw(st.integers(1, min(4, layers // chunks)))
    pieces = workers * chunks
    cut_points = st.lists(st.integers(1, layers - 1), min_size=pieces - 1, max_size=pieces - 1, unique=True)
    chosen = sorted(draw(cut_points)) if pieces > 1 else []
    schedule = draw(st.sampled_from(SINGLE_CHUNK if chunks == 1 else TWO_CHUNKS))
    fewest = 2 * workers if schedule == "dualpipev" else 1
    options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "microbatches": fewest + draw(st.integers(0, 5))}
    options["stages"] = chosen or workers
    options["recompute"] = draw(st.sampled_from(["none", "none", "full", ("every", 1), ("every", 2)]))
    return options


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[pp.Layer], dict[str, Any]]:
    layers = draw(models())
    options = draw(cuts(len(layers)))
    options["clip_grad_norm"] = draw(st.sampled_from([None, 0.05]))
    options["precision"] = draw(st.sampled_from(["fp32", "fp32", "bf16"]))
    return layers, options


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pipeline=pipelines(),
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    optimizer=st.sampled_from([sgd, adam]),
)
def test_any_model_cut_anywhere_trains_to_the_same_bits(
    pipeline: tuple[list[pp.Layer], dict[str, Any]], sizes: list[int], optimizer: Any
) -> None:
    layers, options = pipeline
    model = pp.Model(layers, squared_error, optimizer, seed=3)
    batches = random_batches(sizes)
    plain = PlainLoop(model, options["microbatches"], options["clip_grad_norm"], options["precision"])
    with launched("thread", model, batches, **options) as client:
        assert [result.loss for result in client.steps()] == plain.steps(batches)
        assert_same_state(client.state_dict(), plain.state_dict())


def test_a_batch_that_passes_a_stage_untouched_keeps_its_bits() -> None:
    # Slices of few features begin anywhere in a cache line, which products notice: they came to the next stage at the
    # beginning of one. So do conjugated values and gradients, which came as numbers in memory.
    few = 6
    untouched = [apply(lambda x: x), pp.Layer(nn.Linear, few, few)]
    model = pp.Model([*untouched, apply(_conjugate), apply(lambda z: z.imag), *untouched], squared_error, sgd)
    batches = random_batches([12, 10, 7], 3, few)
    plain = PlainLoop(model, 4)
    with launched("thread", model, batches, stages=[1, 3], microbatches=4) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_convolutions_compute_with_the_nodes_number_of_threads() -> None:
    # In a process of its own: the tests' has been told to have one thread before torch was loaded.
    script = """
import torch
from torch import nn
import lp_pipe.pipeline as pp

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

batch = torch.randn(8, 3, 6, 6), torch.randn(8, 4, 6, 6)
model = pp.Model([nn.Conv2d(3, 4, 3, padding=1)], nn.functional.mse_loss, sgd)
print(pp.check(model, [batch], stages=1, microbatches=2))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("equal"), done.stdout


@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": 1, "schedule": "gpipe", "recompute": "full"}], ids=str)
def test_the_first_layer_may_write_to_its_input(options: dict[str, Any]) -> None:
    # While earlier micro-batches, which are slices of the same batch, wait for their backwards.
    model = pp.Model([apply(lambda x: x.mul_(2)), LINEAR, LINEAR], _sum_of_squares, sgd)
    ((x, y),) = random_batches([B_], T_, D_)
    plain = PlainLoop(model, 4)
    plain.step((x.clone(), y))
    with launched("thread", model, microbatches=4, **options) as pipeline:
        before = x.clone()
        pipeline.step((x, y))
        assert_same_state(pipeline.state_dict(), plain.state_dict())
        assert torch.equal(x, before)


class _Langevin(torch.optim.SGD):
    """Adds noise to what it has updated."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.01)


def _langevin(parameters: Any) -> torch.optim.Optimizer:
    return _Langevin(parameters, lr=0.1)


@pytest.mark.parametrize("replicas", [1, 3])
def test_an_optimizer_that_draws_does_so_as_a_layer_before_the_first_one(replicas: int) -> None:
    # It drew from wherever torch's generator was: others in each run, and replicas had weights of their own.
    model = pp.Model([nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)], squared_error, _langevin)
    report = pp.check(model, random_batches([6, 6]), stages=1, replicas=replicas, microbatches=3)
    assert report.equal, report


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_what_an_optimizer_draws_is_the_same_in_each_run_and_after_a_resume(schedule: str, tmp_path: Path) -> None:
    model = pp.Model([nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)], squared_error, _langevin)
    batches, found = random_batches([6, 6, 6]), []
    for run in range(2):
        torch.manual_seed(run)
        with launched("thread", model, batches, stages=2, schedule=schedule, microbatches=3) as pipeline:
            list(pipeline.steps(1))
            pipeline.save(tmp_path)
            for _ in range(2):
                list(pipeline.steps())
                found.append(pipeline.fingerprint())
                pipeline.load(tmp_path)
    assert len(set(found)) == 1
