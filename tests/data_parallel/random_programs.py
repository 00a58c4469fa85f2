"""Random training programs with deaths of workers, each as a plain loop, too. A program follows from its seed."""

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from tests.data_parallel.loops import SEED, RunningMean, accumulate

PLACES = ("begin", "shard", "backward", "before step", "after step")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01),
}


@dataclass(frozen=True)
class RandomProgram:
    """What a seed decides. deaths: node, step and place."""

    seed: int
    mode: str
    backend: str
    replicas: int
    workers: int
    on_failure: str
    deaths: tuple[tuple[str, int, str], ...]
    steps: int
    sizes: tuple[int, ...]  # of the batches, in turn
    microbatches: int
    widths: tuple[int, ...]
    is_tied: bool
    frozen_every: int  # steps, of the first of several layers; 0: never
    optimizer: str
    clip: float | None
    bucket_bytes: int
    zero: int
    save_every: int | None

    @classmethod
    def of(cls, seed: int, mode: str = "thread") -> "RandomProgram":
        rng = random.Random(seed)
        replicas = rng.randint(1, 4)
        workers = rng.randint(1, replicas)
        steps = rng.randint(2, 7)
        on_failure = rng.choice(["stop", "restart", "restart", "shrink", "shrink"])
        dying = rng.sample(range(workers), rng.randint(0, workers if on_failure == "restart" else workers - 1))
        deaths = [(f"replicas/{node}", rng.randrange(steps), rng.choice(PLACES)) for node in dying]
        made = cls(
            seed=seed,
            mode=mode,
            backend=rng.choice(["auto", "inproc" if mode == "thread" else "shm", "direct"]),
            replicas=replicas,
            workers=workers,
            on_failure=on_failure,
            deaths=tuple(deaths) if on_failure != "stop" else (),
            steps=steps,
            sizes=tuple(rng.randint(1, 11) for _ in range(rng.randint(1, 3))),
            microbatches=rng.randint(1, 3),
            widths=tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 4))),
            is_tied=rng.random() < 0.3,
            frozen_every=rng.choice([0, 0, 2, 3]),
            optimizer=rng.choice(list(OPTIMIZERS)),
            clip=rng.choice([None, 0.3]),
            bucket_bytes=rng.choice([1, 64, 200, 4 << 20]),
            zero=rng.choice([0, 1]),
            save_every=None,
        )
        if not made.zero or len(made.deaths) < 2:
            return made
        # Shards whose mirrors die with them come from a checkpoint; that of step 1 is complete when step 2 has begun.
        later = [(node, step + 2, place) for node, step, place in made.deaths]
        return replace(made, deaths=tuple(later), steps=steps + 2, save_every=1)

    def build(self) -> tuple["RandomNet", torch.optim.Optimizer]:
        with pp.layer_rng(SEED, self.seed):
            model = RandomNet(self.widths, is_tied=self.is_tied)
        return model, OPTIMIZERS[self.optimizer](model.parameters())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        size = self.sizes[step % len(self.sizes)]
        return torch.randn(size, 3, generator=generator), torch.randn(size, self.widths[-1], generator=generator)

    def configure(self, step: int, model: "RandomNet") -> None:
        if self.frozen_every and len(self.widths) > 1:
            model.layers[0].requires_grad_(step % self.frozen_every != 0)

    def plainly(self) -> list[Tensor]:
        """Train in one plain loop, and return the state."""
        model, optimizer = self.build()
        for step in range(self.steps):
            self.configure(step, model)
            accumulate(model, step, self.batch(step), self.replicas, self.microbatches, F.mse_loss)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
        return _state(model, optimizer)

    def program(self, folder: Path) -> lp.Program:
        made = lp.Program("random")
        dp.add_replicas(
            made,
            train_randomly,
            self,
            str(folder),
            replicas=self.replicas,
            workers=self.workers,
            backend=self.backend if self.workers > 1 or self.backend != "shm" else "auto",
            on_failure=self.on_failure,
            seed=SEED,
        )
        return made

    def differences(self, folder: Path) -> list[str]:
        """Return the files of workers whose state is not the plain loop's to the bit, and what is wrong with them."""
        expected, wrong = self.plainly(), []
        files = sorted(folder.glob("*.pt"))
        least = self.workers if self.on_failure != "shrink" else self.workers - len(self.deaths)
        if not least <= len(files) <= self.workers:  # a death at the end of the last step may leave its file
            wrong.append(f"{len(files)} of {self.workers} workers have ended")
        for file in files:
            found = torch.load(file)
            unequal = [index for index, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
            wrong += [f"{file.name}: tensor {index}" for index in unequal]
        return wrong


class RandomNet(nn.Module):
    """Linear layers of these widths, a running mean, dropout, and a layer that is used for positive sums only."""

    def __init__(self, widths: tuple[int, ...], *, is_tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.mean = RunningMean(widths[-1])
        self.sometimes = nn.Linear(widths[-1], widths[-1])
        if is_tied and len(widths) > 1 and widths[-1] == widths[-2]:
            self.sometimes.weight = self.layers[-1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.2)
        x = self.mean(x)
        found: Tensor = self.sometimes(x) if x.detach().sum() > 0 else x
        return found


def train_randomly(replica: dp.Replica, given: RandomProgram, folder: str) -> None:
    """Train replicated; die where the program says, once; write the state."""
    name = lp.context().name
    mark = Path(folder) / f"{name.replace('/', '-')}.died"

    def die_at(step: int, place: str) -> None:
        if (name, step, place) in given.deaths and not mark.exists():
            mark.touch()
            if given.mode == "process":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(f"{name} dies at {place} of step {step}")

    model, inner = given.build()
    optimizer = replica.optimizer(inner, model, given.zero, given.clip, given.bucket_bytes)
    for step in replica.steps(given.steps, given.save_every, model=model, optimizer=optimizer):
        die_at(step, "begin")
        given.configure(step, model)
        for shard in replica.shards(given.batch(step), given.microbatches):
            output = model(shard.input)
            die_at(step, "shard")
            output.register_hook(lambda gradient, step=step: die_at(step, "backward"))
            (F.mse_loss(output, shard.target) * shard.weight).backward()
        die_at(step, "before step")
        optimizer.step()
        die_at(step, "after step")
    torch.save(_state(model, optimizer), Path(folder) / f"{name.replace('/', '-')}.pt")


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"]
    found = [value for index in sorted(states) for _, value in sorted(states[index].items())]
    return [*model.state_dict().values(), *(value for value in found if isinstance(value, Tensor))]
