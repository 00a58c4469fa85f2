"""Unmodified DDP, ZeroRedundancyOptimizer, FSDP2 and DCP train to a plain loop's bits over a group's backend."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import lp_pipe as lp
from lp_pipe.collectives.group import Group
from lp_pipe.collectives.process_group import open_process_group

pytestmark = pytest.mark.usefixtures("warm_template")  # which has imported torch, as every node must

STEPS = 3
WITHIN_S = 60.0


def model_of(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).to(device)


def batch_of(step: int, rank: int, device: str) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def plain(count: int, mean: Callable[[list[Tensor]], Tensor], device: str) -> list[Tensor]:
    """Parameters after STEPS steps of a loop over the ranks' batches."""
    model = model_of(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(STEPS):
        gradients = []
        for rank in range(count):
            model.zero_grad()
            model(batch_of(step, rank, device)).square().sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        for parameter, of_ranks in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = mean(list(of_ranks))
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def mean_of_quotients(parts: list[Tensor]) -> Tensor:
    """As DDP takes it: each rank's gradient is scaled, and then they are added."""
    total = parts[0] * (1.0 / len(parts))
    for part in parts[1:]:
        total = total + part * (1.0 / len(parts))
    return total


def quotient_of_sum(parts: list[Tensor]) -> Tensor:
    """As FSDP2 takes it."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: str) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(step, rank, device)).square().sum().backward()
        optimizer.step()


def assert_equal(parameters: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(parameters, expected, strict=True))


def use_torchs_wrappers(folder: Path, device: str) -> None:
    kind = torch.device(device).type
    group = Group.meet("ranks")
    world = open_process_group(group.backend)
    rank, count = group.rank, group.world_size
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, count, "lp_pipe")

    model = DistributedDataParallel(model_of(device), process_group=world)
    train(model, torch.optim.Adam(model.parameters(), 1e-2), rank, device)
    assert_equal(list(model.module.parameters()), plain(count, mean_of_quotients, device))

    model = DistributedDataParallel(model_of(device), process_group=world)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=world, lr=1e-2)
    train(model, zero, rank, device)
    assert_equal(list(model.module.parameters()), plain(count, mean_of_quotients, device))

    sharded = fully_shard(model_of(device), mesh=DeviceMesh.from_group(world, kind))
    train(sharded, torch.optim.Adam(sharded.parameters(), 1e-2), rank, device)
    whole = [parameter.full_tensor() for parameter in sharded.parameters()]
    assert_equal(whole, plain(count, quotient_of_sum, device))

    dcp.save(sharded.state_dict(), checkpoint_id=folder / "checkpoint")
    again = fully_shard(model_of(device), mesh=DeviceMesh.from_group(world, kind))
    state = again.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    again.load_state_dict(state)
    assert_equal([parameter.full_tensor() for parameter in again.parameters()], whole)

    told: list[Any] = [None] * count
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": other} for other in range(count)]
    received = torch.empty(count * (rank + 1), device=device)
    dist.all_to_all_single(
        received,
        torch.arange(sum(range(1, count + 1)), device=device) + 0.0,
        [rank + 1] * count,
        list(range(1, count + 1)),
    )
    assert received.tolist() == [float(sum(range(rank + 1)) + index) for index in range(rank + 1)] * count
    dist.destroy_process_group()
    (folder / str(rank)).touch()
    group.backend.barrier()


def run_torchs_wrappers(launched: Any, count: int, folder: Path, device: str) -> None:
    program = lp.Program("wrappers")
    with program.group("ranks"):
        for _ in range(count):
            program.add_node(lp.PyNode(use_torchs_wrappers, folder, device))
    launched(program, "process").wait(WITHIN_S)
    assert {path.name for path in folder.iterdir()} >= {str(rank) for rank in range(count)}


@pytest.mark.parametrize("count", [2, 3])
def test_torchs_wrappers_train_to_the_bits_of_a_plain_loop(launched: Any, count: int, tmp_path: Path) -> None:
    run_torchs_wrappers(launched, count, tmp_path, "cpu")
