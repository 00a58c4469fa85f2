"""Values that share memory are apart behind a cut: to write to one there is refused."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.overlaps import overlapping
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, sgd, squared_error
from tests.pipeline.test_exactness import apply

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([4, 5])


def test_overlaps_are_exact_for_slices_of_one_tensor() -> None:
    whole = torch.arange(60).reshape(3, 4, 5)
    slices = [slice(0, 1), slice(0, 2), slice(1, 3), slice(2, 3)]
    parts = [whole[a, b, c] for a, b, c in itertools.product(slices, slices, [*slices, slice(0, 5, 2), slice(3, 5)])]
    for first, second in itertools.combinations(parts, 2):
        shared = not set(first.flatten().tolist()).isdisjoint(second.flatten().tolist())
        if first.stride() == second.stride():
            assert overlapping([first, second]) == ((0, 1) if shared else ())
        elif shared:
            assert overlapping([first, second]) == (0, 1)


def test_tensors_of_their_own_memory_do_not_overlap() -> None:
    query, key = torch.randn(2, 8).chunk(2, dim=1)
    assert overlapping([query, key, torch.randn(2), torch.empty(0), torch.empty(0)]) == ()
    assert overlapping([query, key, key[:, :1]]) == (1, 2)
    windows = torch.arange(9).unfold(0, 3, 1)
    assert overlapping([windows[:2], windows[3:]]) == (0, 1)  # element 3


def test_tensors_without_memory_to_compare_are_left_to_the_channel() -> None:
    # In a tuple they failed here, by "Cannot access storage of SparseTensorImpl"; the channel says what to send.
    assert overlapping([torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), torch.ones(3)]) == ()


class Wrapping(nn.Module):
    """A tensor class as for quantized weights, whose numbers are in other tensors."""

    def __init__(self, is_returned: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("scale", TwoTensor(torch.ones(D), torch.ones(D)))
        self.is_returned = is_returned

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return TwoTensor(x, x) if self.is_returned else x * 2


def test_tensors_that_have_no_memory_are_kept_by_stages_and_left_to_the_channel() -> None:
    # Both were "Attempted to access the data pointer on an invalid python storage".
    told = pytest.raises(Exception, match="a channel carries plain dense tensors, not a TwoTensor")
    for is_returned, served in ((False, contextlib.nullcontext()), (True, told)):
        layers = [pp.Layer(Wrapping, is_returned), pp.Layer(nn.Linear, D, D)]
        model = pp.Model(layers, squared_error, sgd)
        with launched("thread", model, stages=[1], microbatches=2) as pipeline, served:
            pipeline.step(BATCHES[0])


def _model(values: Callable[[Any], Any], after: Callable[[Any], Any]) -> pp.Model:
    linear = pp.Layer(nn.Linear, D, D)
    return pp.Model([linear, apply(values), apply(after), linear], squared_error, sgd)


@pytest.mark.parametrize(
    "values",
    [lambda x: (x, x[..., :2]), lambda x: (x.sin(), x), lambda x: (x[..., :4], x[..., 4:])],
    ids=["a slice", "another", "halves"],
)
def test_who_only_reads_or_writes_to_memory_of_its_own_is_served(values: Callable[[Any], Any]) -> None:
    is_apart = values(torch.zeros(1, D))[0].shape != (1, D)
    after = (lambda v: torch.cat([v[0].mul_(2), v[1]], -1)) if is_apart else (lambda v: v[0] * 2 + v[1].sum())
    model = _model(values, after)
    plain = PlainLoop(model, 2)
    with launched("thread", model, BATCHES, stages=[2], microbatches=2) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_who_writes_to_one_of_two_is_told() -> None:
    # The other one kept its values, where one process changes both: another training, in silence.
    model = _model(lambda x: (x, x[..., :2]), lambda v: (v[1].mul_(2), v[0])[1])
    match = "writes in place to a tensor that came from another stage"
    with launched("thread", model, stages=[2], microbatches=2) as pipeline:
        with pytest.raises(pp.PipelineError, match=match):
            pipeline.step(BATCHES[0])
        with pytest.raises(pp.PipelineError, match=match):
            pipeline.forward(BATCHES[0][0])


class KeepsState(nn.Module):
    """Hands on a buffer, or an output that it keeps as one."""

    state: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("state", torch.ones(2, D))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x) * self.state.mean(0)
        if self.kind == "an output":
            self.state = y.detach()[0]
            return y
        return y, self.state if self.kind == "a buffer" else self.state[0]


class Writes(nn.Module):
    def forward(self, value: Any, *states: Any) -> Tensor:
        y, state = value if isinstance(value, tuple) else (value, *states, value)[:2]
        with torch.no_grad():
            state.mul_(0.9)
        z: Tensor = y * 2
        return z


@pytest.mark.parametrize("stages", [[1], [2], [1, 2]], ids=str)
@pytest.mark.parametrize("kind", ["a buffer", "a slice of one", "an output"])
def test_who_writes_to_what_an_earlier_stage_keeps_is_told(kind: str, stages: list[int]) -> None:
    # The buffer had kept its values, where one process changes it: another training, in silence.
    passes_on = apply(lambda value: value)
    model = pp.Model([KeepsState(kind), passes_on, Writes(), nn.Linear(D, D)], squared_error, sgd)
    told = pytest.raises(pp.PipelineError, match=r"a parameter or buffer: in one process .* change both")
    with launched("thread", model, stages=stages, microbatches=2) as pipeline, told:
        pipeline.step(BATCHES[0])


@pytest.mark.parametrize("kind", ["a buffer", "a slice of one"])
def test_who_writes_to_it_through_a_skip_is_told(kind: str) -> None:
    layers = [pp.Stash("state", KeepsState(kind)), nn.Linear(D, D), pp.Pop("state", Writes())]
    told = pytest.raises(pp.PipelineError, match="writes in place to a tensor that came from another stage")
    with launched("thread", pp.Model(layers, squared_error, sgd), stages=[1, 2], microbatches=2) as pipeline, told:
        pipeline.step(BATCHES[0])


@pytest.mark.parametrize("kind", ["a buffer", "a slice of one", "an output"])
def test_who_only_reads_what_an_earlier_stage_keeps_is_served(kind: str) -> None:
    reads = apply(lambda value: value[0] * value[1].mean() if isinstance(value, tuple) else value * 2)
    model = pp.Model([KeepsState(kind), reads, nn.ReLU(inplace=True), nn.Linear(D, D)], squared_error, sgd)
    plain = PlainLoop(model, 2)
    with launched("thread", model, BATCHES, stages=[1, 2], microbatches=2) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class Hooked(nn.Module):
    """A layer with a hook on its output, or on one of several."""

    def __init__(self, *, in_a_tuple: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.in_a_tuple = in_a_tuple

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        y.register_hook(lambda gradient: gradient * 0.5)
        return (y, x * 2) if self.in_a_tuple else y


@pytest.mark.parametrize("in_a_tuple", [False, True])
def test_who_writes_to_a_view_with_a_hook_is_told(in_a_tuple: bool) -> None:
    # Linear's output of three dimensions is a view, whose hook autograd forgets where one writes to it. Behind a cut
    # the hook was called: other gradients than in one process, in silence.
    writes = apply((lambda v: v[0].relu_() + v[1]) if in_a_tuple else (lambda v: v.relu_()))
    model = pp.Model([Hooked(in_a_tuple=in_a_tuple), writes, nn.Linear(D, D)], squared_error, sgd)
    assert pp.check(model, BATCHES, stages=[2], microbatches=2)
    with pytest.raises(pp.PipelineError, match=r"a view with a hook"):
        pp.check(model, BATCHES, stages=[1], microbatches=2)


def test_who_writes_to_another_tensor_with_a_hook_and_who_reads_a_view_with_one_are_served() -> None:
    flat = [(x.reshape(-1, D), y.reshape(-1, D)) for x, y in BATCHES]
    for batches, layer in ((flat, nn.ReLU(inplace=True)), (BATCHES, nn.ReLU())):
        model = pp.Model([Hooked(), layer, nn.Linear(D, D)], squared_error, sgd)
        assert pp.check(model, batches, stages=[1], microbatches=2)
