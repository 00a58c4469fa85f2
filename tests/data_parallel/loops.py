"""A training loop that runs replicated and plainly, for the tests of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp

SEED = 5


class RunningMean(nn.Module):
    """Subtract a running mean: buffers that each replica writes to, also with a single sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.tensor(0))

    def reset_parameters(self) -> None:
        """Begin anew, also after the module was built on the meta device."""
        self.mean.zero_()
        self.count.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.count += 1
        return x - self.mean


class Net(nn.Module):
    """Dropout, buffers, a tied weight, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mean, self.inner = nn.Linear(6, 8), RunningMean(8), nn.Linear(8, 8)
        self.again, self.leave, self.unused = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(2, 2)
        self.again.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.mean(self.enter(x)), 0.3)
        found: Tensor = self.leave(self.again(torch.tanh(self.inner(x))))
        return found


def build() -> Net:
    with pp.layer_rng(SEED, 0):
        return Net()


def batch(step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return 10 samples, or 3 in each third step, which are fewer than there are replicas."""
    generator = torch.Generator().manual_seed(step)
    size = 10 if step % 3 else 3
    x, y = torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)
    return x.to(device), y.to(device)


def configure(step: int, model: Any) -> None:
    """Freeze a layer in some of the steps."""
    model.inner.requires_grad_(step % 4 != 2)


def accumulate(
    model: nn.Module,
    step: int,
    batch: tuple[Tensor, Tensor],
    replicas: int,
    microbatches: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    count: Callable[[Tensor], int] = len,
) -> None:
    """Give the model the gradients and buffers of a step, as the contract says (docs/data_parallel.md).

    count: the weight of a micro-batch, by its targets.
    """
    inputs, targets = batch
    parts = [
        list(zip(xs.chunk(microbatches), ys.chunk(microbatches), strict=True))
        for xs, ys in zip(inputs.chunk(replicas), targets.chunk(replicas), strict=True)
    ]
    whole = sum(count(y) for part in parts for _, y in part)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total: list[Tensor | None] = []
    first: dict[str, Tensor] = {}
    for replica, part in enumerate(parts):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        model.zero_grad()
        for index, (x, y) in enumerate(part):
            with pp.step_rng(SEED, replica, step, index):
                (loss_of(model(x), y) * (count(y) / whole)).backward()
        found = [parameter.grad for parameter in model.parameters()]
        total = found if replica == 0 else [_added(a, b) for a, b in zip(total, found, strict=True)]
        first = first or {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(first[name])
    for parameter, gradient in zip(model.parameters(), total, strict=True):
        parameter.grad = gradient


def plain_loop(
    steps: int,
    replicas: int,
    microbatches: int = 1,
    clip: float | None = 0.5,
    device: str = "cpu",
    fused: bool | None = None,
) -> tuple[Net, torch.optim.Optimizer]:
    """Train in one plain loop."""
    model = build().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    for step in range(steps):
        configure(step, model)
        accumulate(model, step, batch(step, device), replicas, microbatches, F.cross_entropy)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return model, optimizer


def train(
    replica: dp.Replica,
    folder: str,
    steps: int,
    microbatches: int = 1,
    save_every: int | None = None,
    zero: int = 0,
    clip: float | None = 0.5,
    is_meta: bool = False,
    device: str = "cpu",
    fused: bool | None = None,
) -> None:
    """Train replicated; write what came out as rank{rank}.pt. is_meta: build a sharded model on the meta device."""
    with pp.layer_rng(SEED, 0):
        with torch.device("meta" if is_meta else "cpu"):
            model: nn.Module = Net()
        model = model if is_meta else model.to(device)
        if zero >= 2:
            model = replica.shard(model, zero)
    adam = torch.optim.Adam(model.parameters(), 0.01, fused=fused)
    options: dict[str, Any] = {"clip_grad_norm": clip, "bucket_bytes": 200, "zero": zero if zero < 2 else 0}
    optimizer = replica.optimizer(adam, model, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    for step in replica.steps(steps, save_every, model=model, optimizer=optimizer, scheduler=scheduler):
        configure(step, model)
        for shard in replica.shards(batch(step, device), microbatches):
            (F.cross_entropy(model(shard.input), shard.target) * shard.weight).backward()
        optimizer.step()
        scheduler.step()
    torch.save((model.state_dict(), optimizer.state_dict()), Path(folder) / f"rank{replica.rank}.pt")


def differences(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what each rank has that is not equal to the plain loop's to the bit; at least one rank has written."""
    expected: dict[str, Any] = dict(model.state_dict())
    for index, values in optimizer.state_dict()["state"].items():
        expected |= {f"{index}.{name}": value for name, value in values.items()}
    files = sorted(folder.glob("rank*.pt"))
    assert files
    wrong = []
    for file in files:
        parameters, state = torch.load(file, weights_only=False)
        found = dict(parameters)
        for index, values in state["state"].items():
            found |= {f"{index}.{name}": value for name, value in values.items()}
        wrong += [f"{file.name}: {name}" for name in expected.keys() ^ found.keys()]
        for name, value in found.items():
            if not torch.equal(value, expected[name]):
                wrong.append(f"{file.name}: {name}, by up to {(value - expected[name]).abs().max():g}")
    return wrong


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient
