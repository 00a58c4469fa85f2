"""Replicas whose model is on a GPU, and whose gradients servers sum, train to the bits of the plain loop there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from tests.data_parallel.loops import SEED, differences, plain_loop, train
from tests.gpu.peers import DEVICE

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]

STEPS = 8
LEARNING_STEPS = 20
WITHIN_S = 60
BUSY = 20_000_000  # cycles, some 10 ms


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize(
    ("mode", "servers"),
    [
        ("thread", dp.Servers(1, partition_bytes=200)),
        ("thread", dp.Servers(3, partition_bytes=200, colocated=False, priority=False)),
        ("process", dp.Servers(3, partition_bytes=200)),
        ("process", dp.Servers(1, partition_bytes=200, priority=False)),
    ],
)
def test_servers_train_as_one_process(mode: str, servers: dp.Servers, clip: float | None, tmp_path: Path) -> None:
    """Train with two workers that host two replicas each; without clipping, updates are late if there is priority."""
    program = lp.Program("replicas")
    options: dict[str, Any] = {"replicas": 4, "workers": 2, "seed": SEED, "backend": servers}
    dp.add_replicas(program, train, str(tmp_path), STEPS, 2, clip=clip, device=DEVICE, **options)
    lp.launch(program, mode=mode, run_dir=tmp_path / "run").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 4, 2, clip, DEVICE)) == []


def test_servers_sum_for_shards_of_the_optimizers_state(tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options: dict[str, Any] = {"replicas": 4, "workers": 2, "seed": SEED, "backend": dp.Servers(2, partition_bytes=200)}
    dp.add_replicas(program, train, str(tmp_path), STEPS, 2, zero=1, device=DEVICE, **options)
    lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 4, 2, device=DEVICE)) == []


def build() -> nn.Module:
    with pp.layer_rng(3, 0):
        layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(16, 2)).to(DEVICE)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return x.to(DEVICE), x[:, :2].tanh().to(DEVICE)


def learn(replica: dp.Replica, folder: str, is_late: bool | None = None, dies_at: int | None = None) -> None:
    """Train, and write each step's loss and the parameters; the GPU is far behind this process.

    is_late: whether updates of the step before are left when a step begins; None: unknown.
    dies_at: the step in which the worker of rank 1 dies, once.
    """
    mark = Path(folder) / "died"
    model = build()
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    losses = []
    for step in replica.steps(LEARNING_STEPS, model=model, optimizer=optimizer):
        assert is_late is None or optimizer.late.is_left == (is_late and step > 0)
        for x, y, weight in replica.shards(batch(step)):
            torch.cuda._sleep(BUSY)
            loss = F.mse_loss(model(x), y)
            (loss * weight).backward()
            losses.append(loss.detach())
        if step == dies_at and replica.rank == 1 and not mark.exists():
            mark.touch()
            raise OSError("this worker dies")
        torch.cuda._sleep(BUSY)
        optimizer.step()
    torch.save((torch.stack(losses), model.state_dict()), Path(folder) / f"{replica.rank}.pt")


def learned(folder: Path, launch_mode: str, is_late: bool | None = None, **options: Any) -> list[tuple[Tensor, Any]]:
    """Return the losses and the parameters of both workers."""
    program = lp.Program("replicas")
    dp.add_replicas(program, learn, str(folder), is_late, replicas=2, **options)
    lp.launch(program, mode=launch_mode, run_dir=folder / "run").wait(WITHIN_S)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def plainly_learned() -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(LEARNING_STEPS):
        gradients: list[list[Tensor]] = []
        for x, y in zip(*(part.chunk(2) for part in batch(step)), strict=True):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) * 0.5).backward()
            gradients.append([one.grad for one in model.parameters() if one.grad is not None])
        for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = first + second
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("priority", [True, False])
def test_gradients_are_pushed_once_the_gpu_has_made_them(mode: str, priority: bool, tmp_path: Path) -> None:
    expected = plainly_learned()
    for rank, (_, found) in enumerate(
        learned(tmp_path, mode, priority, backend=dp.Servers(1, partition_bytes=2048, priority=priority))
    ):
        wrong = {
            name: f"by up to {(value - expected[name]).abs().max():g}"
            for name, value in found.items()
            if not torch.equal(value, expected[name])
        }
        assert wrong == {}, rank


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_dead_worker_does_not_change_what_servers_sum(mode: str, tmp_path: Path) -> None:
    expected = plainly_learned()
    options: dict[str, Any] = {"backend": dp.Servers(2, partition_bytes=2048), "on_failure": "restart", "dies_at": 5}
    for rank, (_, found) in enumerate(learned(tmp_path, mode, **options)):
        assert all(torch.equal(value, expected[name]) for name, value in found.items()), rank
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("compression", [dp.Fp16(), dp.TopK(0.2), dp.OneBit()])
def test_compressed_gradients_are_learnt_from(compression: Any, tmp_path: Path) -> None:
    for losses, _ in learned(tmp_path, "thread", backend=dp.Servers(1, compression=compression)):
        assert losses[-3:].mean() < 0.7 * losses[:3].mean(), losses


@pytest.mark.parametrize(
    ("mode", "servers"),
    [("thread", dp.Servers(1)), ("process", dp.Servers(3)), ("thread", dp.Servers(2, compression=dp.Fp16()))],
)
def test_asynchronous_workers_learn(mode: str, servers: dp.Servers, tmp_path: Path) -> None:
    (losses, own), (others_losses, others) = learned(tmp_path, mode, backend=servers, mode="async")
    for one in (losses, others_losses):
        assert one[-3:].mean() < 0.7 * one[:3].mean(), one
    for name, value in own.items():
        assert torch.equal(value, others[name]), (name, (value - others[name]).abs().max())
        assert value.device == torch.device(DEVICE)


def go_on_asynchronously(replica: dp.Replica, steps: int) -> None:
    model = nn.Sequential(build(), nn.BatchNorm1d(2).to(DEVICE))
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters(), 0.01, fused=True), model)
    for step in replica.steps(steps, 2, model=model, optimizer=optimizer):
        for x, y, weight in replica.shards(batch(step)):
            (F.mse_loss(model(x), y) * weight).backward()
        optimizer.step()
        assert {one.device for one in (*model.parameters(), *model.buffers())} == {torch.device(DEVICE)}
    assert int(model[1].num_batches_tracked) == steps


def test_asynchronous_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    for steps in (4, 7):
        program = lp.Program("replicas")
        options: dict[str, Any] = {"replicas": 2, "backend": dp.Servers(2), "mode": "async"}
        dp.add_replicas(program, go_on_asynchronously, steps, **options)
        lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(WITHIN_S)


def push(replica: dp.Replica) -> None:
    for number in range(3):
        x = torch.zeros(300, 70, device=DEVICE).t()
        torch.cuda._sleep(BUSY)
        x += replica.rank + number
        found = replica.push_pull({"x": x, "y": torch.ones(2)}, "x").result(WITHIN_S)
        assert found["x"].device == x.device and torch.equal(found["x"], torch.full_like(x, 1.0 + 2 * number))
        assert torch.equal(found["y"], torch.full((2,), 2.0))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_tensors_of_the_gpu_are_pushed(mode: str, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, push, replicas=2, backend=dp.Servers(1))
    lp.launch(program, mode=mode, run_dir=tmp_path / "run").wait(WITHIN_S)
