"""Older weights are used in the place of parameters, and are in all else what these are."""

import torch
from torch import Tensor, nn

from lp_pipe.pipeline.compute.weight_versions import WeightVersions


class Scale(nn.Parameter):
    """A parameter of a class of its own."""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale(torch.ones(3))
        self.scale.share = 0.25  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.scale.share  # type: ignore[attr-defined]


def test_a_forward_finds_the_weights_of_its_version_and_its_backward_leaves_them_to_the_parameter() -> None:
    layer = Scaled()
    parameter = layer.scale
    versions = WeightVersions([layer], {"scale": parameter})
    assert versions.use(0) == 0
    output = layer(torch.ones(3))
    versions.begin_next(needed_from=0)
    with torch.no_grad():
        parameter.mul_(2)
    assert versions.use(0) == 0
    assert torch.equal(layer.scale, torch.ones(3))
    output.sum().backward()
    versions.take_gradients(0)
    versions.use_own()
    assert layer.scale is parameter
    assert torch.equal(layer.scale, torch.full((3,), 2.0))
    assert torch.equal(parameter.grad, torch.full((3,), 0.25))


def test_they_have_the_class_and_the_attributes_of_their_parameter() -> None:
    # They were plain parameters: a layer that looks at its own failed, with the asynchronous schedules alone.
    layer = Scaled()
    versions = WeightVersions([layer], {"scale": layer.scale})
    versions.use(0)
    assert type(layer.scale) is Scale
    assert torch.equal(layer(torch.ones(3)), torch.full((3,), 0.25))
    versions.restore(5, {4: {"scale": torch.zeros(3)}})
    versions.use(4)
    assert type(layer.scale) is Scale
    assert torch.equal(layer(torch.ones(3)), torch.zeros(3))
