"""A stage: forwards that wait for their backwards, cut off from the graphs of the stages around it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lp_pipe.channels.packing import copied
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.layers.message import Message, to_message


def stage_of(*layers: nn.Module, index: int = 0, first_layer: int = 0) -> Stage:
    return Stage(index, first_layer, list(layers), seed=0)


def test_two_stages_make_the_gradients_of_the_whole() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4)
    nn.Sequential(first, nn.Tanh(), second)(x).square().sum().backward()
    expected = [parameter.grad.clone() for layer in (first, second) for parameter in layer.parameters()]
    first.zero_grad()
    second.zero_grad()

    near, far = stage_of(first, nn.Tanh()), stage_of(second, index=1, first_layer=2)
    sent = to_message(near.forward(Message(x, ()), step=0, microbatch=0))
    message = Message(copied(sent.value), sent.wants_gradient)  # what a channel does
    output = far.forward(message, step=0, microbatch=0)
    gradients = far.backward_from_loss(0, output.square().sum())
    assert near.backward(0, gradients) == []

    got = [parameter.grad for layer in (first, second) for parameter in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_microbatches_may_wait_for_each_other_in_any_order() -> None:
    stage = stage_of(nn.Linear(2, 1, bias=False))
    outputs = [stage.forward(Message(torch.full((1, 2), float(n)), ()), 0, n) for n in range(3)]
    assert sorted(stage.activation_stash) == [0, 1, 2]
    for microbatch in (1, 0, 2):
        stage.backward_from_loss(microbatch, outputs[microbatch].sum())
    assert not stage.activation_stash
    assert stage.layers[0].weight.grad.tolist() == [[3.0, 3.0]]


def test_a_message_has_no_graph_and_says_who_wants_a_gradient() -> None:
    x = torch.randn(2, requires_grad=True)
    message = to_message({"a": x * 2, "b": (torch.arange(3), "text"), "c": x})
    assert message.wants_gradient == (True, False, True)
    assert not any(leaf.requires_grad for leaf in (message.value["a"], message.value["b"][0], message.value["c"]))
    assert message.value["b"][1] == "text"


def test_an_in_place_first_layer_may_write_to_what_it_got() -> None:
    stage = stage_of(nn.ReLU(inplace=True), nn.Linear(2, 2), index=1)
    message = Message(torch.tensor([[-1.0, 1.0]]), (True,))
    output = stage.forward(message, 0, 0)
    (gradient,) = stage.backward_from_loss(0, output.sum())
    assert gradient is not None and gradient[0, 0] == 0 and gradient[0, 1] != 0


class First(nn.Module):
    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        return values[0] * 2


def test_inputs_that_do_not_matter_get_no_gradient() -> None:
    stage = stage_of(First(), index=1)
    message = Message((torch.ones(1), torch.ones(1), torch.arange(2)), (True, True, False))
    used, unused = stage.backward_from_loss(0, stage.forward(message, 0, 0).sum())
    assert used is not None and used.tolist() == [2.0]
    assert unused is None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x * self.used, x * self.unused, 5


def test_outputs_that_do_not_matter_give_no_gradient() -> None:
    layer = Two()
    stage = stage_of(layer)
    stage.forward(Message(torch.full((1,), 3.0), ()), 0, 0)
    stage.backward(0, [torch.ones(1), None])
    assert layer.used.grad is not None and layer.used.grad.tolist() == [3.0]
    assert layer.unused.grad is None


def test_when_no_output_matters_the_backward_does_nothing() -> None:
    layer = Two()
    stage = stage_of(layer, index=1)
    stage.forward(Message(torch.ones(1), (True,)), 0, 0)
    assert stage.backward(0, [None, None]) == [None]
    assert layer.used.grad is None


def test_a_stage_without_anything_to_train_hands_gradients_through() -> None:
    stage = stage_of(nn.Identity(), index=1)
    stage.forward(Message(torch.ones(2), (True,)), 0, 0)
    (gradient,) = stage.backward(0, [torch.tensor([1.0, 2.0])])
    assert gradient is not None and gradient.tolist() == [1.0, 2.0]


def test_nothing_is_asked_of_a_stage_before_which_all_is_frozen() -> None:
    stage = stage_of(nn.Linear(2, 2), index=1)
    output = stage.forward(to_message(torch.ones(1, 2)), 0, 0)
    assert stage.backward_from_loss(0, output.sum()) == []


def test_dropout_depends_on_layer_step_and_microbatch_only() -> None:
    x = Message(torch.ones(64), ())
    reference = stage_of(nn.Identity(), nn.Identity(), nn.Dropout(0.5)).forward(x, step=4, microbatch=1)
    torch.rand(3)
    same: Any = stage_of(nn.Dropout(0.5), index=1, first_layer=2)
    assert torch.equal(same.forward(x, step=4, microbatch=1), reference)
    assert not torch.equal(same.forward(x, step=5, microbatch=1), reference)
    assert not torch.equal(same.forward(x, step=4, microbatch=2), reference)


def test_names_are_those_of_the_whole_sequential() -> None:
    layers = [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))]
    stage = stage_of(*layers[1:], index=1, first_layer=1)
    whole = nn.Sequential(*layers)
    assert list(stage.state_dict()) == [name for name in whole.state_dict() if not name.startswith("0.")]
    assert [name for name, _ in stage.named_parameters()] == [
        name for name, _ in whole.named_parameters() if not name.startswith("0.")
    ]


def test_a_shared_parameter_is_named_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    assert [name for name, _ in stage_of(first, second).named_parameters()] == ["0.weight", "0.bias", "1.bias"]
    assert list(stage_of(first, second).state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_load_state_dict_takes_its_own_part_of_the_whole() -> None:
    stage = stage_of(nn.Linear(1, 1), index=1, first_layer=1)
    whole = {
        f"{layer}.{name}": torch.full(shape, 1.0 * layer)
        for layer in (0, 1, 10)
        for name, shape in (("weight", (1, 1)), ("bias", (1,)))
    }
    stage.load_state_dict(whole)
    assert stage.state_dict()["1.weight"].item() == 1.0
    with pytest.raises(RuntimeError, match="bias"):
        stage.load_state_dict({"1.weight": torch.ones(1, 1)})
