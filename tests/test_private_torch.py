"""Private parts of torch are asked for in one module, and pipelines train in a torch that has lost them."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe
import lp_pipe.pipeline as pp
from lp_pipe import private_torch
from tests.pipeline.plain_loop import launched_many
from tests.test_private_python import PRIVATE, names_asked_for_in, without

PACKAGE = Path(lp_pipe.__file__).parent
# Of os, sys, namedtuple and Enum.
DOCUMENTED = {"_exit", "_current_frames", "_getframe", "_replace", "_fields", "_asdict", "_make", "_name_", "_value_"}
# Everything that a user may have hooked into torch is looked up in these.
OF_TORCH = [nn.Module(), torch.ones(1), torch.ones(1).sum().requires_grad_() * 2, torch.ops.aten.add.Tensor, torch]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return all modules but the two that may ask for private names, and generated ones."""
    paths = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    names = [name for name in paths if not name.startswith(("protos", "private_torch.py", "private_python.py"))]
    return {name: ast.parse(paths[name].read_text()) for name in names}


def own_names() -> set[str]:
    """Return the names with an underscore that lp_pipe itself defines."""
    found: set[str] = set()
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def private_names_in(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield what the module imports or reads with an underscore, and is not its own package's or documented."""
    overridden = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            of = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            names = [part for alias in node.names for part in alias.name.split(".")] + of
            yield from (name for name in names if PRIVATE.fullmatch(name) and name not in own)
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in DOCUMENTED:
            owner = ast.unparse(node.value)
            is_own = owner in ("self", "cls") or (owner == "super()" and node.attr in overridden)
            is_torchs = any(hasattr(one, node.attr) for one in OF_TORCH) and not is_own
            if is_torchs or node.attr not in own:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "attrgetter")):
            given = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (name for name in map(str, given) if PRIVATE.fullmatch(name) and name not in own | DOCUMENTED)


def test_no_other_module_asks_for_a_private_part_of_torch_or_python() -> None:
    own = own_names()
    found = {name: set(private_names_in(tree, own)) for name, tree in modules().items()}
    assert {name: names for name, names in found.items() if names} == {}


class Scaled(nn.Parameter):
    """A parameter of another class, as libraries have them."""


class Shifted(nn.Module):
    """Shifts its input by a running mean, which is a buffer that its backward does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled(torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls += 1
        return (x - self.mean.clone()) * self.weight


class Whole(nn.Module):
    """A module to be split by torch.export, with a block without gradients and a conversion of a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        with torch.no_grad():
            size = hidden.abs().mean()
        return self.last((hidden / (1 + size)).float())


class Feeder:
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return x, x.sum(dim=1, keepdim=True)


def model(layers: list[Any]) -> pp.Model:
    return pp.Model(layers, nn.functional.mse_loss, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))


def layers() -> list[Any]:
    return [pp.Layer(nn.Linear, 4, 8), nn.BatchNorm1d(8), pp.Layer(Shifted), nn.Tanh(), pp.Layer(nn.Linear, 8, 1)]


def pipelines() -> list[tuple[pp.Model, Any, dict[str, Any]]]:
    """Return pipelines of several kinds, among which all private names are asked for."""
    split = pp.split(Whole(), torch.randn(4, 4), ["last"])
    kinds = [
        (layers(), {"recompute": "full", "clip_grad_norm": 1.0}),
        (layers(), {"schedule": "zb_h1", "precision": "fp16", "channel": "gloo"}),
        (layers(), {"schedule": "pipedream"}),
        (split, {"clip_grad_norm": 1.0}),
    ]
    return [(model(made), Feeder, {"microbatches": 2, **options}) for made, options in kinds]


def trained(pipelines: list[tuple[pp.Model, Any, dict[str, Any]]], folder: Path) -> list[dict[str, Tensor]]:
    """Return the parameters and buffers of each pipeline after three steps, a save, another step and a load."""
    with launched_many("thread", pipelines) as clients:
        states = []
        for index, client in enumerate(clients):
            assert [result.why_skipped for result in client.steps(3)] == [""] * 3
            state = client.state_dict()
            client.save(folder / str(index))
            list(client.steps(1))
            client.load(folder / str(index))
            assert all(torch.equal(state[name], value) for name, value in client.state_dict().items())
            states.append(state)
    return states


NAMES = names_asked_for_in(private_torch)


def test_pipelines_train_to_the_same_bits_without_any_private_part_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    expected = trained(pipelines(), tmp_path / "whole")
    torch.manual_seed(0)
    monkeypatch.setattr(private_torch, "getattr", without(*NAMES), raising=False)
    for before, after in zip(expected, trained(pipelines(), tmp_path / "lost"), strict=True):
        assert before.keys() == after.keys()
        assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_trains_without(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(private_torch, "getattr", without(name), raising=False)
    trained([(model(layers()), Feeder, {"schedule": "zb_h1", "microbatches": 2, "clip_grad_norm": 1.0})], tmp_path)
