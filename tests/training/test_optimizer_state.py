"""An optimizer around another one, such as timm's Lookahead, goes on from a checkpoint as if it had not stopped."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import D, assert_same_state, launched, random_batches, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([6] * 6)


class Around(torch.optim.Optimizer):
    """Every second step goes half of the way back; what it and Adam know is in Adam's state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = defaultdict(dict)  # stays empty
        self._optimizer_step_pre_hooks = {}  # type: ignore[assignment]
        self._optimizer_step_post_hooks = {}  # type: ignore[assignment]
        for group in inner.param_groups:
            group.setdefault("count", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.inner.param_groups:
            group["count"] += 1
            for parameter in group["params"] if group["count"] % 2 == 0 else ():
                slow = self.inner.state[parameter].setdefault("slow", parameter.detach().clone())
                slow.add_(parameter - slow, alpha=0.5)
                parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


def around_adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return Around(torch.optim.Adam(named, lr=0.01))


def warmed_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)


def test_a_wrapped_optimizers_state_is_saved_and_loaded(tmp_path: Path) -> None:
    """Regression: its own `state` is empty, so its moments were left out, and the training went on without them."""
    model = pp.Model([nn.Linear(D, D) for _ in range(3)], squared_error, around_adam, lr_scheduler=warmed_up)
    with launched("thread", model, BATCHES, stages=2, microbatches=2) as pipeline:
        list(pipeline.steps(3))
        pipeline.save(tmp_path / "half")
        list(pipeline.steps(3))
        wanted = pipeline.state_dict()
    with launched("thread", model, BATCHES, stages=3, microbatches=2) as pipeline:
        pipeline.load(tmp_path / "half")
        list(pipeline.steps(3))
        assert_same_state(pipeline.state_dict(), wanted)
