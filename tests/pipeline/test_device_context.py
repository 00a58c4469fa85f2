"""What a stage runs in on every device: its device is current, and backwards are done by the stage's own thread."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe.pipeline as pp
from lp_pipe import private_torch
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.layers.message import Message
from lp_pipe.pipeline.worker import worker
from lp_pipe.training.device import CPU, current
from tests.pipeline.plain_loop import D, launched, random_batches, squared_error

PATIENCE_S = 10.0


class _Place(threading.local):
    is_current = False


place = _Place()
seen: dict[str, set[bool]] = {}


def note(what: str) -> None:
    seen.setdefault(what, set()).add(place.is_current)


class Noting(nn.Linear):
    def __init__(self) -> None:
        note("layer made")
        super().__init__(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note("forward")
        return super().forward(x)


class NotingSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        note("update")
        return super().step(closure)


def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return NotingSgd([parameter for _, parameter in named], lr=0.1)


def test_layers_are_made_run_and_updated_on_their_workers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On cuda:1 and later, random numbers would come from another GPU's generator, which is not seeded."""

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        place.is_current = True
        with current(device):
            yield
        place.is_current = False

    monkeypatch.setattr(worker, "current", noted)
    seen.clear()
    model = pp.Model([pp.Layer(Noting) for _ in range(2)], squared_error, optimizer)
    with launched("thread", model, random_batches([4]), stages=2, microbatches=2) as pipeline:
        assert True in seen.pop("layer made")  # those of the setup are for shapes only
        list(pipeline.steps())
    assert seen == {"forward": {True}, "update": {True}}


class AsksAutograd(nn.Module):
    """As a gradient penalty does, or an energy whose force is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_inside.set()
        assert self.may_go_on.wait(PATIENCE_S)
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((y**2).sum(), y)
        return x + slope


def test_stages_of_a_process_do_not_wait_for_each_other_in_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """autograd has one thread for a GPU: here one that all backwards share, unless they are to run where they are."""
    of_gpu = ThreadPoolExecutor(1, thread_name_prefix="autograd")
    run = private_torch._engine_for([torch.ones(1)])
    assert run is not None
    real = run

    def on_gpus_thread(*arguments: Any, **options: Any) -> Any:
        is_there = threading.current_thread().name.startswith("autograd")
        if is_there or not torch._C._is_multithreading_enabled():
            return real(*arguments, **options)
        return of_gpu.submit(real, *arguments, **options).result(PATIENCE_S)

    monkeypatch.setattr(private_torch, "_engine_for", lambda gradients: on_gpus_thread)
    monkeypatch.setattr(torch.autograd, "grad", grad_by(on_gpus_thread))
    asks = AsksAutograd()
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    recomputes, other = Stage(0, 0, layers, 5, recompute="full"), Stage(1, 3, [nn.Linear(4, 4), asks], 5)
    output = recomputes.forward(Message(torch.randn(2, 4), (False,)), 0, 0)

    def in_stage(function: Any, *arguments: Any) -> None:
        with current(CPU):
            function(*arguments)

    threads = ThreadPoolExecutor(2)
    forward = threads.submit(in_stage, other.forward, Message(torch.randn(2, 4), (False,)), 0, 0)
    assert asks.is_inside.wait(PATIENCE_S)
    backward = threads.submit(in_stage, recomputes.backward, 0, [torch.ones_like(output)])
    asks.may_go_on.set()
    forward.result(PATIENCE_S)
    backward.result(PATIENCE_S)


def grad_by(run: Any) -> Any:
    """Return torch.autograd.grad on a given engine."""

    def grad(output: torch.Tensor, *inputs: torch.Tensor) -> Any:
        return run((output,), (torch.ones_like(output),), False, False, inputs, allow_unreachable=False)

    return grad
