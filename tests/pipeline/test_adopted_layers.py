"""Ready-made layers exist once in a stage's process, and train there as copies do where nodes are threads."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.build import are_exclusive
from tests.pipeline.plain_loop import assert_same_state, launched, sgd

pytestmark = pytest.mark.usefixtures("no_leaks")

WIDTH = 320
BATCHES = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def large_things(modules: dict[str, nn.Module]) -> tuple[int, int, set[int]]:
    """Return how many tensors of a layer's size a stage's process has, how many pickles, and the tensors' alignment."""
    gc.collect()
    objects = gc.get_objects()
    tensors = {one.data_ptr() for one in objects if isinstance(one, Tensor) and one.numel() == WIDTH * WIDTH}
    parts = [part for one in objects for part in gc.get_referents(one)]
    pickles = {id(part) for part in parts if isinstance(part, bytes | bytearray) and len(part) >= WIDTH * WIDTH * 4}
    return len(tensors), len(pickles), {place % 64 for place in tensors}


def split_model() -> list[nn.Module]:
    return pp.split(nn.Sequential(*(linear() for _ in range(4))), torch.zeros(4, WIDTH), ["1", "2", "3"])


@pytest.mark.parametrize(
    ("make", "schedule"),
    [(lambda: [linear() for _ in range(4)], "interleaved"), (split_model, "gpipe")],
    ids=["modules", "split"],
)
def test_a_stage_process_has_each_weight_once(make: Any, schedule: str) -> None:
    model = pp.Model(make(), nn.functional.mse_loss, sgd)
    with launched("process", model, stages=2, microbatches=2, schedule=schedule) as pipeline:
        assert pipeline.apply(large_things) == [(2, 0, {0})] * 2


class Held:
    """Serves what a feeder would make of its data set."""

    def __init__(self, data: Tensor) -> None:
        self._rows = data.double()

    def large(self) -> tuple[int, int, set[int]]:
        return large_things({})


def test_a_node_of_its_own_process_lets_its_arguments_go() -> None:
    program = lp.Program("held")
    handle = program.add_node(lp.CourierNode(Held, torch.ones(WIDTH, WIDTH)), label="held")
    with lp.launch(program, "process") as run:
        assert run.client(handle).large() == (1, 0, {0})


class FirstWeight(nn.Module):
    """A layer that also has the first weight of another stage, as a constant."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.inner = linear()
        self.others = [other.weight.detach()]
        self.hook_calls = 0
        self.register_forward_hook(self.count)

    @staticmethod
    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        module.hook_calls += 1  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + x @ self.others[0]
        return result


def shared_model() -> pp.Model:
    """Return a model whose stages share nearly all they have with another stage, the loss, or the optimizer."""
    torch.manual_seed(0)
    first, last = linear(), linear()
    layers = [first, FirstWeight(first), linear(), last]
    anchors = [layer.weight for layer in (first, last)]

    def near_the_start(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) + sum(anchor.detach().sum() for anchor in anchors) * output.mean()

    return pp.Model(layers, near_the_start, sgd, tied=[("2.weight", "3.weight")])


def test_what_others_refer_to_is_copied_so_that_all_modes_have_the_same_bits() -> None:
    found = {}
    for mode in ("thread", "process"):
        with launched(mode, shared_model(), stages=2, microbatches=2, schedule="interleaved") as pipeline:
            losses = [pipeline.step(batch).loss for batch in BATCHES]
            found[mode] = losses, pipeline.state_dict()
    assert found["thread"][0] == found["process"][0]
    assert_same_state(found["thread"][1], found["process"][1])


def test_only_modules_that_nothing_else_refers_to_are_exclusive() -> None:
    def sources(*more: nn.Module) -> list[Any]:
        return [nn.Sequential(linear(), nn.BatchNorm1d(WIDTH)), FirstWeight(linear()), pp.Layer(nn.ReLU), *more]

    assert are_exclusive(sources())
    alone = sources()
    inner = alone[0][0]
    assert not are_exclusive(alone)
    weight = inner.weight
    del inner
    assert not are_exclusive(alone)
    loss = (lambda w: lambda: w.sum())(weight)
    del weight
    assert not are_exclusive(alone)
    del loss
    assert are_exclusive(alone)
    hooked = sources()
    hooked[1].register_forward_hook((lambda module: lambda *args: module)(hooked[1]))
    assert are_exclusive(hooked), "a hook of their own is theirs"


def test_the_users_modules_stay_as_they_are_where_nodes_are_threads() -> None:
    layer = linear()
    before = layer.weight.clone()
    with launched("thread", pp.Model([layer, linear()], nn.functional.mse_loss, sgd), stages=2) as pipeline:
        pipeline.step(BATCHES[0])
    assert torch.equal(layer.weight, before)
