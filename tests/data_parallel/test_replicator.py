"""TF-Replicator's shape of a program, and batch normalization over all replicas, give what one process gives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp

WITHIN_S = 30


def data(step: int) -> Tensor:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(step))


def read(context: dp.InputContext) -> Callable[[int], Tensor]:
    return lambda step: data(step)[context.batch_slice(9)]


def make_step(replica: dp.Replica, folder: str) -> Callable[[Tensor], dict[str, float]]:
    with pp.layer_rng(0, 0):
        model = nn.Linear(4, 1)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)

    def step(batch: Tensor) -> dict[str, float]:
        loss = model(batch).square().sum() / 9
        loss.backward()
        optimizer.step()
        torch.save(model.state_dict(), Path(folder) / f"{replica.num_replicas}-{replica.rank}.pt")
        return {"loss": replica.all_reduce(loss.detach())}

    return step


def test_the_same_program_runs_with_any_number_of_replicas(launched: Any, tmp_path: Path) -> None:
    def step_of(replica: dp.Replica) -> Callable[[Tensor], dict[str, float]]:
        return make_step(replica, str(tmp_path))

    for replicas in (1, 2, 3):
        program = lp.Program("replicator")
        dp.add_replicator(program, step_of, read, replicas=replicas, steps=4)
        run = launched(program, run_dir=tmp_path / f"run{replicas}")
        run.wait(WITHIN_S)
    losses = []
    for replicas in (1, 2, 3):
        lines = (tmp_path / f"run{replicas}" / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line)["values"] for line in lines]
        losses.append([values["loss"] for values in logged if "loss" in values])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0]) and losses[2] == pytest.approx(losses[0])
    first, *others = [torch.load(file) for file in sorted(tmp_path.glob("*.pt"))]
    assert len(others) == 5 and all(torch.allclose(first["weight"], other["weight"]) for other in others)


def test_another_number_of_workers_is_refused() -> None:
    with pytest.raises(dp.DataParallelError, match="workers=1"):
        dp.add_replicator(lp.Program("replicator"), make_step, read, replicas=2, workers=1)


def normalized(replica: dp.Replica, folder: str, microbatches: int) -> None:
    with pp.layer_rng(0, 0):
        model = nn.Sequential(nn.Conv1d(1, 3, 2), dp.BatchNorm(3), nn.Flatten(), nn.Linear(9, 1))
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for step in replica.steps(5):
        for x, y, weight in replica.shards((data(step)[:, None], data(step)), microbatches):
            ((model(x) - y.sum(1, keepdim=True)).square().mean() * weight).backward()
        optimizer.step()
    torch.save(model.state_dict(), Path(folder) / f"{replica.rank}.pt")


def test_batches_are_normalized_over_all_replicas(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, normalized, str(tmp_path), 1, replicas=3)
    launched(program).wait(WITHIN_S)
    with pp.layer_rng(0, 0):
        model = nn.Sequential(nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(9, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        (model(data(step)[:, None]) - data(step).sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, value in model.state_dict().items():
            assert torch.allclose(found[name], value, atol=1e-6), name


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 1), (3, 2)])
def test_batches_of_other_shards_are_not_normalized(
    launched: Any, workers: int, microbatches: int, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, normalized, str(tmp_path), microbatches, replicas=3, workers=workers)
    with pytest.raises(lp.NodeError, match="BatchNorm") as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name == "RuntimeError"
