"""Checkpoints of a model that has changed since: what was frozen is trained, a head is new, names come from hooks."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import assert_same_state, launched

BATCH = torch.randn(8, 8), torch.randint(5, (8,))


def base() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)]


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named if parameter.requires_grad], lr=0.1)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def model(*, frozen: bool, layers: list[nn.Module] | None = None) -> pp.Model:
    layers = copy.deepcopy(layers or base())
    layers[0].requires_grad_(not frozen)
    return pp.Model(layers, nn.functional.cross_entropy, adamw, lr_scheduler=decaying)


def test_a_part_that_was_frozen_begins_with_fresh_optimizer_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launched("thread", model(frozen=True), stages=2, microbatches=2) as pipeline:
        for _ in range(3):
            pipeline.step(BATCH)
        pipeline.save(tmp_path)
        trained = pipeline.state_dict()
    states = []
    for stages in (1, 2):  # a stage of its own for what was frozen, or not: the same learning rate
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            launched("thread", model(frozen=False), stages=stages, microbatches=2) as pipeline,
        ):
            pipeline.step(BATCH)  # the optimizer has some state, which must not stay
            pipeline.load(tmp_path)
            assert_same_state(pipeline.state_dict(), trained)
            assert pipeline.current_step() == 3
            assert set(pipeline.learning_rates().values()) == {0.1 * 0.5**3}
            pipeline.step(BATCH)
            states.append(pipeline.state_dict())
        told = [record.getMessage() for record in caplog.records if "fresh optimizer state" in record.getMessage()]
        assert len(told) == 1 and "0.weight, 0.bias" in told[0]
    assert_same_state(*states)
    assert not torch.equal(states[0]["0.weight"], trained["0.weight"])


def test_a_new_head_is_taken_only_where_load_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with launched("thread", model(frozen=False), stages=2, microbatches=2) as pipeline:
        pipeline.step(BATCH)
        pipeline.save(tmp_path)
        trained = pipeline.state_dict()
    changed = [*base()[:2], nn.Linear(8, 7), nn.Linear(7, 5)]
    new = model(frozen=False, layers=changed)
    with launched("thread", new, stages=2, microbatches=2) as pipeline:
        before = pipeline.state_dict()
        with pytest.raises(pp.PipelineError, match=r"3\.weight.*strict=False"):
            pipeline.load(tmp_path)
        assert_same_state(pipeline.state_dict(), before)
        pipeline.load(tmp_path, strict=False)
        expected = {**before, "0.weight": trained["0.weight"], "0.bias": trained["0.bias"]}
        assert_same_state(pipeline.state_dict(), expected)
        assert "2.weight" in caplog.text and "3.weight" in caplog.text
        assert pipeline.step(BATCH).step == 1


class FusedQKV(nn.Module):
    """A layer with one weight inside, and three in its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(24, 8))
        self.register_state_dict_post_hook(FusedQKV.divide)
        self.register_load_state_dict_pre_hook(FusedQKV.join)

    @staticmethod
    def divide(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, part in zip("qkv", state.pop(prefix + "qkv").chunk(3), strict=True):
            state[prefix + name] = part

    @staticmethod
    def join(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "q" in state:
            state[prefix + "qkv"] = torch.cat([state.pop(prefix + name) for name in "qkv"])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.qkv.t()).chunk(3, -1)
        return torch.softmax(q * k, -1) * v


class Renamed(nn.Linear):
    """Saves its weight under another name, by torch's older way."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)], indirect=True)
def test_what_save_writes_under_names_from_hooks_load_reads(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [FusedQKV(), Renamed(8, 8), nn.Linear(8, 5)]
    hooked = pp.Model(layers, nn.functional.cross_entropy, adamw)
    with launched(mode, hooked, stages=2, microbatches=2) as pipeline:
        pipeline.step(BATCH)
        pipeline.save(tmp_path)
        pipeline.step(BATCH)
        expected = pipeline.state_dict()
        assert [*expected] == ["0.q", "0.k", "0.v", "1.bias", "1.kernel", "2.weight", "2.bias"]
        pipeline.load_state_dict(expected)
    for stages in (1, 3):
        with launched("thread", hooked, stages=stages, microbatches=2) as pipeline:
            pipeline.load(tmp_path)
            pipeline.step(BATCH)  # with the optimizer's state
            assert_same_state(pipeline.state_dict(), expected)
