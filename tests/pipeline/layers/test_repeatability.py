"""Values that a forward makes anew in each call, and torch.export would write down once, are refused."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp


class Anew(nn.Module):
    """A module that multiplies by a number that is new in each call. how: says where it comes from."""

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
        ("first_call", "forward changes 'is_new', .* if only the first call changes it"),
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


class Averages(nn.Module):
    """Keeps a running average of its input in a buffer, and computes with it."""

    average: Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("average", None if how == "from nothing" else torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros(4) if self.average is None else self.average
        average = 0.9 * before + 0.1 * x.detach().mean(0)
        if self.how == "in place":
            before.copy_(average)
        else:
            self.average = average
        return x + average


@pytest.mark.parametrize("how", ["by another", "from nothing"])
def test_another_tensor_in_the_place_of_a_submodules_buffer_is_refused(how: str) -> None:
    # torch.export looks at the outermost module's only: training went on with the buffer as it was at the split.
    module = nn.Sequential(nn.Linear(4, 4), Averages(how), nn.Linear(4, 4))
    with pytest.raises(pp.PipelineError, match=r"replaces buffer '1.average' by another tensor, .* in place \(copy_"):
        pp.split(module, torch.randn(2, 4), ["2"])


class Outermost(Averages):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(super().forward(self.first(x)))
        return y


def test_a_buffer_of_the_outermost_module_that_is_none_at_first_is_refused() -> None:
    with pytest.raises(pp.PipelineError, match="replaces buffer 'average' by another tensor"):
        pp.split(Outermost("from nothing"), torch.randn(2, 4), ["second"])


@pytest.mark.parametrize(
    ("module", "point"),
    [
        (Outermost("by another"), "second"),
        (nn.Sequential(nn.Linear(4, 4), Averages("in place"), nn.Linear(4, 4)), "2"),
    ],
)
def test_other_buffers_that_forward_changes_are_written_down(module: nn.Module, point: str) -> None:
    layers = pp.Sequential(pp.split(copy.deepcopy(module), torch.randn(2, 4), [point]))
    for x in torch.randn(3, 3, 4):
        assert torch.equal(layers(x), module(x))
