"""What a forward has anew in each call, and torch.export would write down once, is refused."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp


class Anew(nn.Module):
    """how: where the number comes from by which forward multiplies."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how
        self.calls, self.temperature, self.is_new = 0, 1.0, True
        self.generator = torch.Generator()
        self.samples: Any = 0
        self.evaluates = False

    def forward(self, x: Tensor) -> Tensor:
        self.evaluates = not self.training  # RWKV's, which only follows the mode
        self.samples = x.shape[0]  # a number that may change: torch writes down how it is made
        y: Tensor = self.second(self.first(x) * getattr(self, f"by_{self.how}")())
        return y

    def by_nothing(self) -> float:
        return self.temperature

    def by_python(self) -> float:
        return random.random()

    def by_numpy(self) -> Tensor:
        return torch.from_numpy(np.random.rand(4)).float()

    def by_a_generator(self) -> Tensor:
        return torch.rand(4, generator=self.generator)

    def by_calls(self) -> int:
        self.calls += 1
        return self.calls

    def by_temperature(self) -> float:
        self.temperature = 0.9 * self.temperature
        return self.temperature

    def by_first_call(self) -> float:
        factor = 2.0 if self.is_new else 1.0
        self.is_new = False
        return factor


@pytest.mark.parametrize(
    ("how", "message"),
    [
        # LayerDrop by random.random() and SpecAugment by numpy: every step of a training had the draw of the export.
        ("python", "draws from Python's random, and torch.export would write down this one draw"),
        ("numpy", "draws from numpy.random, and torch.export would write down this one draw"),
        ("a_generator", "a Generator of its own, .* draw from torch's default generator"),
        # A Gumbel softmax that is to grow harder from call to call kept the temperature that it had at the split.
        ("temperature", "forward changes 'temperature', .* make it a buffer"),
        ("calls", "forward changes 'calls', .* make it a buffer"),
        ("first_call", "forward changes 'is_new', .* if only the first call changes it, make one before"),
    ],
)
def test_a_number_that_forward_has_anew_in_each_call_is_refused(how: str, message: str) -> None:
    module = Anew(how)
    with pytest.raises(pp.PipelineError, match=message):
        pp.split(module, torch.randn(2, 4), ["second"])
    assert (module.calls, module.temperature, module.is_new) == (0, 1.0, True)


def test_what_only_the_first_call_changes_is_no_reason_behind_it() -> None:
    module = Anew("first_call")
    module(torch.randn(2, 4))
    assert len(pp.split(module, torch.randn(2, 4), ["second"])) == 2


def test_a_size_or_a_mode_among_the_attributes_is_no_reason() -> None:
    assert len(pp.split(Anew("nothing"), torch.randn(2, 4), ["second"])) == 2
