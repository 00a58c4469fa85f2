"""Which sizes of a split module's inputs are free."""

import pytest
import torch
from torch import nn

import lp_pipe.pipeline as pp


def test_sizes_that_torch_cannot_solve_for_are_those_of_the_example() -> None:
    # AlexNet and others with strides and pools behind each other: torch.export has sympy work out for which image sizes
    # its graph holds, sympy said that it "cannot be solved", and the module could not be split at all.
    layers = [nn.Conv2d(3, 4, 3, 2, 1), nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(4, 2)]
    module = nn.Sequential(*layers).eval()
    pieces = pp.Sequential(pp.split(module, torch.randn(2, 3, 16, 16), ["1", "3"])).eval()
    for samples in (1, 2, 5):
        images = torch.randn(samples, 3, 16, 16)
        assert torch.equal(pieces(images), module(images))
    with pytest.raises(pp.PipelineError, match=r"split for inputs of shape .*16, 16\], not \[2, 3, 17, 16\]"):
        pieces(torch.randn(2, 3, 17, 16))
