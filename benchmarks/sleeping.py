"""Layers that sleep instead of computing, and write down for how long they really slept."""

import mmap
import pathlib
import struct
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH = 4096  # 16 KiB a micro-batch


class Slept(NamedTuple):
    """Seconds that a layer has slept in all, and in how many forwards."""

    forward: float
    backward_input: float
    backward_weight: float
    forwards: float

    def since(self, before: "Slept") -> "Slept":
        return Slept(*(late - early for late, early in zip(self, before, strict=True)))


_FORM = struct.Struct("4d")
_FORWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT, _FORWARDS = range(4)  # places in it


def slept(record: pathlib.Path) -> Slept:
    """Return the seconds that the sleeper with this record has slept so far."""
    return Slept(*_FORM.unpack(record.read_bytes()))


class _Sleep(torch.autograd.Function):
    """Passes its input on, after the sleeper's seconds for a forward, and its gradient, after those for a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: "Sleeper") -> Tensor:
        ctx.sleeper = sleeper
        _sleep(sleeper, _FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.sleeper, _BACKWARD_INPUT)
        return gradients[0], None


def _sleep(sleeper: "Sleeper", which: int) -> None:
    start = time.monotonic()
    time.sleep(sleeper.seconds)
    sleeper.slept[which] += time.monotonic() - start
    sleeper.slept[_FORWARDS] += which == _FORWARD


class Sleeper(nn.Module):
    """Takes `seconds` for each of its forward, its input's gradient and its weight's gradient, and little beside.

    record: a file that it makes, from which others may read what the three have really taken (`slept`). A mapped one:
    what it costs to write a tensor after a sleep, when nothing is in the core's caches, is no cost of an engine.
    """

    def __init__(self, seconds: float, record: pathlib.Path | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.shift = nn.Parameter(torch.zeros(()))
        self.shift.register_hook(lambda _: _sleep(self, _BACKWARD_WEIGHT))
        self.slept = memoryview(_memory(record)).cast("d")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self)  # type: ignore[no-untyped-call]
        return y + self.shift


def _memory(record: pathlib.Path | None) -> mmap.mmap:
    if record is None:
        return mmap.mmap(-1, _FORM.size)
    with record.open("wb+") as file:
        file.truncate(_FORM.size)
        return mmap.mmap(file.fileno(), _FORM.size)


class Start(nn.Module):
    """Makes the first sleeper's input want a gradient, as an embedding would."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def sgd(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-9)


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    """Return a batch with one row for each micro-batch."""
    return torch.ones(microbatches, WIDTH), torch.ones(microbatches, 1)


def alone(sleep_s: float, layers: int, microbatches: int) -> float:
    """Measure sleepers, forwards and backwards in a plain loop, in units of their sleep."""
    torch.set_num_threads(1)
    sleepers = [Sleeper(sleep_s) for _ in range(layers)]
    model = nn.Sequential(Start(), *sleepers)
    inputs, _ = batch(microbatches)
    start = time.monotonic()
    for row in inputs.split(1):
        model(row).mean().backward()
    return (time.monotonic() - start) / sum(sum(sleeper.slept[:3]) for sleeper in sleepers)
