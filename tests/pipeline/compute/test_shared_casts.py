"""Under autocast the micro-batches in flight share the casts of weights: less memory, and the bits without a cache."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lp_pipe.pipeline.compute.activation_meter import ActivationMeter
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.layers.message import Message
from lp_pipe.training.rng import step_rng

WIDTH, MICROBATCHES = 64, 4
SEED = 3


class Twice(nn.Linear):
    """Its weight is used twice: with autocast's cache its gradients would add up in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).relu()) + x @ self.weight.t()


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.unsqueeze(0))[0][0]  # type: ignore[no-any-return]


class Convolved(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(1)).flatten(1)[:, :WIDTH]


class WritesItsWeight(nn.Linear):
    """Each micro-batch has other weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class AsksFunc(nn.Linear):
    """torch.func refuses hooks of saved tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.func.grad(lambda y: (y**2).sum())(x)


class CastsItself(nn.Linear):
    """It makes casts of its own: of another kind, in another layout, and one that it writes to."""

    def forward(self, x: Tensor) -> Tensor:
        half = torch.nn.functional.linear(x.half(), self.weight.half())
        turned = self.weight.t().to(torch.bfloat16, memory_format=torch.contiguous_format)
        written = self.weight.to(torch.bfloat16)
        with torch.no_grad():
            written.mul_(2.0)
        return super().forward(x) + half + x.bfloat16() @ turned + x.bfloat16() @ written


class WritesItsResult(nn.Module):
    """exp saves its result, which is not what it was by the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().mul_(2.0) * 1.0


def layers(*kinds: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(WIDTH, WIDTH) for kind in kinds]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(MICROBATCHES)]


def gradients(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def trained_as_stage(modules: list[nn.Module], precision: str) -> None:
    """Run all forwards and then all backwards, as in GPipe."""
    stage = Stage(0, 0, modules, SEED, precision=precision)
    outputs = [stage.forward(Message(x, (False,)), 0, number) for number, x in enumerate(inputs())]
    for number, output in enumerate(outputs):
        stage.backward(number, [torch.ones_like(output)])


def trained_in_loop(modules: list[nn.Module], dtype: torch.dtype) -> None:
    outputs = []
    for number, value in enumerate(inputs()):
        for index, module in enumerate(modules):
            with step_rng(SEED, index, 0, number), torch.autocast("cpu", dtype, cache_enabled=False):
                value = module(value)
        outputs.append(value)
    for output in outputs:
        output.backward(torch.ones_like(output))


@pytest.mark.parametrize(
    ("kinds", "precision"),
    [
        ([nn.Linear, nn.Linear], "bf16"),
        ([Twice, nn.Linear], "bf16"),
        ([Twice, nn.Linear], "fp16"),
        ([Recurrent, Twice], "bf16"),
        ([lambda *_: Convolved(1, 4, 3), nn.Linear], "bf16"),
        ([lambda *_: nn.LayerNorm(WIDTH), nn.Linear, lambda *_: nn.RReLU(), lambda *_: nn.Dropout()], "bf16"),
        ([nn.Linear, WritesItsWeight], "bf16"),
        ([AsksFunc, nn.Linear], "bf16"),
        ([nn.Linear, CastsItself], "bf16"),
    ],
    ids=["linear", "twice", "fp16", "lstm", "conv", "norm", "written", "func", "own casts"],
)
def test_gradients_have_the_bits_of_autocast_without_its_cache(kinds: list[Any], precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    in_stage, in_loop = layers(*kinds), layers(*kinds)
    for _ in range(2):
        trained_as_stage(in_stage, precision)
        trained_in_loop(in_loop, dtype)
        for one, other in zip(gradients(in_stage), gradients(in_loop), strict=True):
            assert one is not None and other is not None and torch.equal(one, other)
        for modules in (in_stage, in_loop):
            torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1).step()


def stash_bytes(kinds: list[Any], precision: str) -> int:
    meter = ActivationMeter()
    modules = layers(*kinds)
    meter.leave_out(parameter for module in modules for parameter in module.parameters())
    stage = Stage(0, 0, modules, SEED, precision=precision)
    with meter.counting():
        outputs = [stage.forward(Message(x, (False,)), 0, number) for number, x in enumerate(inputs())]
        found = meter.bytes
        for number, output in enumerate(outputs):
            stage.backward(number, [torch.ones_like(output)])
    assert meter.bytes == 0, "all is free after the backwards"
    return found


def test_the_micro_batches_in_flight_keep_the_weights_once() -> None:
    kinds = [nn.Linear] * 3
    cast_weights = 3 * 2 * WIDTH * WIDTH
    activations = 4 * MICROBATCHES * 3 * 8 * WIDTH  # at most: in bfloat16 they are smaller
    assert cast_weights < stash_bytes(kinds, "bf16") <= cast_weights + activations


def test_a_saved_tensor_that_is_written_to_is_refused_as_by_autograd() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained_as_stage([nn.Linear(WIDTH, WIDTH), WritesItsResult()], "bf16")
