"""Parameters that are updated late, when their sums have come from the servers, are never seen before that."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp

STEPS = 5
WITHIN_S = 60


def build() -> nn.Module:
    with pp.layer_rng(3, 0):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)


def plain_loop() -> list[list[Tensor]]:
    """Return the parameters before each step and at the end, as the contract of data parallelism says."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen = []
    for step in range(STEPS):
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
        total: list[Tensor] = []
        for x, y in zip(*(part.chunk(2) for part in batch(step)), strict=True):
            model.zero_grad()
            (F.mse_loss(model(x), y) * 0.5).backward()
            own = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            total = [a + b for a, b in zip(total, own, strict=True)] if total else own
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient
        optimizer.step()
        scheduler.step()
    return [*seen, [parameter.detach().clone() for parameter in model.parameters()]]


def train(replica: dp.Replica, folder: str, has_priority: bool) -> None:
    model = build()
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen, last = [], next(iter(model.parameters()))
    for step in replica.steps(STEPS, model=model, optimizer=optimizer, scheduler=scheduler):
        assert optimizer.late.is_left == (has_priority and step > 0)
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
        for x, y, weight in replica.shards(batch(step)):
            (F.mse_loss(model(x), y) * weight).backward()
        optimizer.step()
        scheduler.step()
        assert last.grad is None
    seen.append([value.clone() for value in model.state_dict().values()])
    torch.save(seen, Path(folder) / f"{replica.rank}.pt")


@pytest.mark.parametrize("has_priority", [True, False])
def test_reads_through_the_model_see_every_update(launched: Any, has_priority: bool, tmp_path: Path) -> None:
    program = lp.Program("late")
    servers = dp.Servers(1, partition_bytes=64, priority=has_priority)
    dp.add_replicas(program, train, str(tmp_path), has_priority, replicas=2, backend=servers)
    launched(program).wait(WITHIN_S)
    expected = plain_loop()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for step, (own, wanted) in enumerate(zip(found, expected, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True)), (rank, step)


def train_behind_the_models_back(replica: dp.Replica) -> None:
    model = build()
    weight = model[0].weight
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.01), model)
    for step in replica.steps(2, model=model, optimizer=optimizer):
        for x, _, share in replica.shards(batch(step)):
            ((x @ weight.T).sum() * share).backward()
        optimizer.step()


def test_a_gradient_of_a_parameter_that_was_not_read_through_the_model_is_an_error(launched: Any) -> None:
    program = lp.Program("late")
    dp.add_replicas(program, train_behind_the_models_back, replicas=2, backend=dp.Servers(1))
    with pytest.raises(lp.NodeError, match=r"0\.weight") as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name == "DataParallelError"
