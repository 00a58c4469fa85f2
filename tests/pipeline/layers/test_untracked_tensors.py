"""Tensors are found in objects that are no containers to torch."""

from collections import UserDict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lp_pipe.pipeline.layers.message import untracked_tensors

ONE = torch.ones(1)


@dataclass(slots=True)
class Compact:
    it: Any


class More(Compact):
    pass


class Box(dict[str, Any]):
    pass


def around_itself() -> SimpleNamespace:
    loop = SimpleNamespace(it=ONE)
    loop.again = [loop, loop]
    return loop


@pytest.mark.parametrize(
    ("leaf", "names"),
    [
        (SimpleNamespace(a=1, b=SimpleNamespace(c=ONE), d=[ONE, {"e": ONE}]), ["b.c", "d.0", "d.1.e"]),
        (Compact(ONE), ["it"]),
        (More((ONE,)), ["it.0"]),
        (Box(x=ONE, y="y"), ["x"]),
        (UserDict(x=deque([ONE])), ["data.x.0"]),
        (around_itself(), ["it"]),
    ],
)
def test_each_one_is_found_by_its_way(leaf: Any, names: list[str]) -> None:
    assert [name for name, _ in untracked_tensors(leaf)] == names


@pytest.mark.parametrize(
    "leaf", [None, 1, "text", torch.float32, slice(1, 2), torch.Size([1]), nn.Linear(1, 1), Box, len]
)
def test_what_holds_none_holds_none(leaf: Any) -> None:
    assert list(untracked_tensors(leaf)) == []
