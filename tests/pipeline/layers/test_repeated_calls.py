"""A module whose forward remembers in secret is not split; one that only notes what it did is."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.repeatability import is_same_again

D = 4


class Keeps(nn.Module):
    def __init__(self, keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)
        self.register_buffer("scale", torch.ones(D))
        self.keep = keep
        self.last: Any = None
        self.all: list[Tensor] = []
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.keep(self, self.norm(self.one(x))))
        return y


def _last(module: Any, x: Tensor) -> Tensor:
    x = x if module.last is None else x + module.last
    module.last = x.detach()[0]
    return x


def _all(module: Any, x: Tensor) -> Tensor:
    module.all.append(x.detach()[0])
    return x + torch.stack(module.all).sum(0)


def _own_generator(module: Any, x: Tensor) -> Tensor:
    return x * float(module.random.random())


@pytest.mark.parametrize("keep", [_last, _all, _own_generator])
def test_a_forward_that_remembers_beside_its_buffers_is_refused(keep: Any) -> None:
    # The graph had what there was at the split in all steps: no hidden state, the first draw.
    module = Keeps(keep)
    with pytest.raises(pp.PipelineError, match="forward computes something else when it is called again"):
        pp.split(module, torch.randn(3, D), ["two"])


class ReturnsMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.all = [*self.all, self.two(self.one(x))]
        return tuple(self.all)


def test_a_forward_that_returns_more_in_each_call_is_refused() -> None:
    with pytest.raises(pp.PipelineError, match="forward computes something else when it is called again"):
        pp.split(ReturnsMore(), torch.randn(3, D), ["two"])


def _notes(module: Any, x: Tensor) -> Tensor:
    module.last = x
    module.all.append(x)
    return x


def _draws_and_writes(module: Any, x: Tensor) -> Tensor:
    module.scale.mul_(0.5)
    scale: Tensor = module.scale.clone()
    return nn.functional.dropout(x) * torch.rand(D) * scale


@pytest.mark.parametrize("keep", [_notes, _draws_and_writes])
def test_what_is_not_read_again_or_is_a_buffer_is_no_reason(keep: Any) -> None:
    module = Keeps(keep)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert len(pp.split(module, torch.randn(3, D), ["two"])) == 2
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_example_of_sizes_only_is_split_without_a_look() -> None:
    module = nn.Sequential(nn.Embedding(3, D), nn.Linear(D, D))
    assert len(pp.split(module, torch.full((2, 5), 99), ["1"])) == 2


class _MadeDtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.dtypes |= {leaf.dtype for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)}
        return made


def test_outputs_of_equal_bits_are_compared_as_they_are() -> None:
    # Logits of 2 x 1024 tokens and 50000 words were copied to complex numbers: 8 GiB more than a forward needs.
    module = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D))
    with _MadeDtypes() as made:
        assert is_same_again(module, ((torch.randn(3, D),), {}))
    assert torch.complex128 not in made.dtypes
