"""The diffs on the pages for those who come from DDP, Horovod, BytePS and others make their loops train replicated."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp

DOCS = Path(__file__).parent.parent.parent / "docs"
MOST_LINES = 10  # of a diff, where a line that is replaced counts once
WITHIN_S = 30

LOOP = """\
def train():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(20):
        x, y = batch_of(step)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    done(model)
"""
HOROVOD = """\
def train():
    hvd.init()
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(20):
        x, y = (part.chunk(hvd.size())[hvd.rank()] for part in batch_of(step))
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    done(model)
"""
BYTEPS = """\
def train():
    bps.init()
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(20):
        x, y = (part.chunk(bps.size())[bps.rank()] for part in batch_of(step))
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    done(model)
"""
DEEPSPEED = """\
def train():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(20):
        x, y = (part.chunk(world_size)[rank] for part in batch_of(step))
        engine.backward(loss_of(engine(x), y))
        engine.step()
    done(engine.module)
"""
REPLICATOR = """\
def input_fn(ctx):
    return lambda step: [part.chunk(ctx.num_input_workers)[ctx.input_worker] for part in batch_of(step)]
def make_step(ctx):
    model = build()
    optimizer = ctx.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    def step(batch):
        loss = loss_of(model(batch[0]), batch[1]) / ctx.num_replicas
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done(model)
        return {"loss": ctx.all_sum(loss.detach())}
    return step
replicator.run(make_step, input_fn, steps=20)
"""


def diffs_of(page: str) -> list[list[str]]:
    blocks = re.findall(r"```diff\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return [block.splitlines() for block in blocks]


def applied(diff: list[str], loop: str) -> str:
    rest, made = loop.splitlines(), []
    for line in diff:
        if line[0] == "+":
            made.append(line[1:])
            continue
        while rest[0] != line[1:]:  # IndexError: the loop has no such line
            made.append(rest.pop(0))
        first = rest.pop(0)
        made += [first] if line[0] == " " else []
    return "\n".join([*made, *rest])


def build() -> nn.Module:
    with pp.layer_rng(0, 0):
        return nn.Linear(4, 2)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x[:, :2]


class Engine:
    """DeepSpeed's engine, in one process."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Any) -> None:
        self.module, self._optimizer = model, optimizer

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class OneReplica:
    """TF-Replicator with one replica."""

    num_replicas, num_input_workers, input_worker = 1, 1, 0

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def all_sum(self, x: Tensor) -> Tensor:
        return x

    def run(self, make_step: Callable[[Any], Any], input_fn: Callable[[Any], Any], steps: int) -> None:
        step_function, batches = make_step(self), input_fn(self)
        for step in range(steps):
            step_function(batches(step))


@pytest.mark.parametrize(
    ("page", "loop", "workers"),
    [
        ("coming_from_ddp.md", LOOP, 1),
        ("coming_from_ddp.md", LOOP, 2),
        ("coming_from_horovod.md", HOROVOD, 2),
        ("coming_from_byteps.md", BYTEPS, 2),
        ("coming_from_deepspeed.md", DEEPSPEED, 1),
        ("coming_from_deepspeed.md", DEEPSPEED, 2),
        ("coming_from_tf_replicator.md", REPLICATOR, 2),
    ],
)
def test_a_few_changed_lines_train_the_same(launched: Any, page: str, loop: str, workers: int) -> None:
    diff = diffs_of(page)[0]
    assert max(counts_of(diff)) <= MOST_LINES
    trained: list[dict[str, Tensor]] = []
    names = names_of_loops(trained)
    exec(loop, names)
    if loop is not REPLICATOR:
        names["train"]()
    plain = trained[-1]
    trained.clear()
    names["program"] = lp.Program("ported")
    exec(applied(diff, loop), names)
    if loop is not REPLICATOR:
        backend = dp.Servers(1) if loop is BYTEPS else "auto"
        dp.add_replicas(names["program"], names["train"], replicas=2, workers=workers, backend=backend)
    launched(names["program"]).wait(WITHIN_S)
    assert len(trained) >= workers and all(torch.allclose(trained[-1][name], plain[name], atol=1e-6) for name in plain)


def test_an_engine_becomes_a_pipeline(launched: Any) -> None:
    _, diff = diffs_of("coming_from_deepspeed.md")
    assert max(counts_of(diff)) <= MOST_LINES
    trained: list[dict[str, Tensor]] = []
    names = names_of_loops(trained)
    exec(DEEPSPEED, names)
    names["train"]()
    names["program"] = lp.Program("ported")
    exec(applied(diff, DEEPSPEED), names)
    names["program"].add_node(lp.PyNode(names["train"], names["pipeline"]), label="trainer")
    launched(names["program"]).wait(WITHIN_S)
    plain, ported = trained
    assert ported.keys() == {f"0.{name}" for name in plain}
    assert all(torch.allclose(ported[f"0.{name}"], value, atol=1e-6) for name, value in plain.items())


def counts_of(diff: list[str]) -> list[int]:
    return [sum(line.startswith(sign) for line in diff) for sign in "+-"]


def names_of_loops(trained: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Return the names that the loops use; `done` appends a model's state to `trained`."""
    hvd = SimpleNamespace(
        init=lambda: None,
        size=lambda: 1,
        rank=lambda: 0,
        DistributedOptimizer=lambda optimizer, **_: optimizer,
        broadcast_parameters=lambda *_, **__: None,
        broadcast_optimizer_state=lambda *_, **__: None,
    )
    deepspeed = SimpleNamespace(initialize=lambda **options: (Engine(**options), options["optimizer"], None, None))
    return {
        **{"torch": torch, "lp": lp, "dp": dp, "pp": pp, "hvd": hvd, "bps": hvd, "deepspeed": deepspeed, "config": {}},
        **{"world_size": 1, "rank": 0, "build": build, "batch_of": batch_of},
        **{"loss_of": nn.functional.mse_loss, "replicator": OneReplica()},
        "done": lambda model: trained.append({name: value.clone() for name, value in model.state_dict().items()}),
    }
