"""Layers that sleep instead of computing, and remember for how long they really slept."""

import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4096  # 16 KiB a micro-batch


class _Sleep(torch.autograd.Function):
    """Passes its input on: after the sleeper's seconds there (`slept[there]`), after as much back (`slept[back]`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: "Sleeper", there: int | None, back: int) -> Tensor:
        ctx.sleeper, ctx.back = sleeper, back
        if there is not None:
            _sleep(sleeper, there)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _sleep(ctx.sleeper, ctx.back)
        return gradients[0], None, None, None


def _sleep(sleeper: "Sleeper", which: int) -> None:
    start = time.monotonic()
    time.sleep(sleeper.seconds)
    slept = sleeper.slept  # looked up here: after later forwards it is another tensor
    slept[which] += time.monotonic() - start
    slept[3] += which == 0


class Sleeper(nn.Module):
    """Takes `seconds` for each of its forward, its input's gradient and its weight's gradient.

    slept: what the three have really taken, all in all, then the number of forwards. A buffer, so that it is in the
    state that a pipeline gives out.
    """

    slept: Tensor

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("slept", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self, 0, 1)  # type: ignore[no-untyped-call]
        scale: Tensor = _Sleep.apply(self.scale, self, None, 2)  # type: ignore[no-untyped-call]
        return y * scale


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
    """One row for each micro-batch."""
    return torch.ones(microbatches, WIDTH), torch.ones(microbatches, 1)
