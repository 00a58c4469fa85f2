"""A model of tokens with all that makes exactness hard, trained replicated and plainly, with one fingerprint."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from tests.data_parallel.loops import SEED, accumulate

REPLICAS, MICROBATCHES, CLIP = 4, 2, 1.0
VOCABULARY, WIDTH, LENGTH = 11, 8, 5
NO_TOKEN = -100


class TokenNet(nn.Module):
    """Tied embeddings, BatchNorm, dropout, a layer in bfloat16, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.BatchNorm1d(WIDTH)
        self.inner, self.unused = nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.norm(self.embed(x_BT).transpose(1, 2)).transpose(1, 2)
        x = x + self.inner(F.dropout(x, 0.2).bfloat16()).float()
        found: Tensor = self.head(torch.tanh(x)).transpose(1, 2)
        return found


def build() -> tuple[TokenNet, torch.optim.Optimizer]:
    with pp.layer_rng(SEED, 1):
        model = TokenNet()
    return model, torch.optim.Adam(model.parameters(), 0.01)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return 10 sequences, or 3 in each third step; at least the first token of each has a target."""
    generator = torch.Generator().manual_seed(step)
    size = 10 if step % 3 else 3
    tokens = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    is_padding = torch.rand(size, LENGTH, generator=generator) < 0.4
    is_padding[:, 0] = False
    return tokens, (tokens * 3 % VOCABULARY).masked_fill(is_padding, NO_TOKEN)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets, ignore_index=NO_TOKEN)


def count_tokens(targets: Tensor) -> int:
    return int((targets != NO_TOKEN).sum())


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return a hash of parameters, buffers and optimizer state that a metric can hold: 52 bits."""
    digest = hashlib.sha256()
    for value in _tensors([*model.state_dict().values(), optimizer.state_dict()["state"]]):
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 12


def plain_fingerprint(steps: int) -> int:
    model, optimizer = build()
    for step in range(steps):
        accumulate(model, step, batch(step), REPLICAS, MICROBATCHES, loss_of, count_tokens)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return fingerprint(model, optimizer)


def train(replica: dp.Replica, steps: int) -> None:
    """Train replicated, and log the fingerprint."""
    model, inner = build()
    optimizer = replica.optimizer(inner, model, clip_grad_norm=CLIP, bucket_bytes=300)
    for step in replica.steps(steps, model=model, optimizer=optimizer):
        for shard in replica.shards(batch(step), MICROBATCHES, count_tokens):
            (loss_of(model(shard.input), shard.target) * shard.weight).backward()
        optimizer.step()
    lp.log_metrics({"fingerprint": fingerprint(model, optimizer)}, step=steps)


def program(steps: int, workers: int, backend: str) -> lp.Program:
    made = lp.Program("tokens")
    options = {"replicas": REPLICAS, "workers": workers, "seed": SEED, "backend": backend}
    dp.add_replicas(made, train, steps, **options)
    return made


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)
