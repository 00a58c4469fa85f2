"""The models that benchmarks train, and their data: the same for every party that is compared.

Shapes: B sequences, T tokens, D width.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe.pipeline as pp

Batch = tuple[Tensor, Tensor]
Parameters = list[tuple[str, nn.Parameter]]
Factory = Callable[[], nn.Module]

SEED = 1
_VOCABULARY = 96
_POOL = 4  # different batches; making new ones would cost the parties time that has nothing to do with pipelines


@dataclass(frozen=True)
class Workload:
    """A model as layer factories, where to cut it in two, and its batches. Picklable."""

    name: str
    factories: tuple[Factory, ...]
    cut: int
    batch_size: int
    make_batch: Callable[[torch.Generator], Batch]
    optimizer: Callable[[Parameters], torch.optim.Optimizer]

    def layers(self, first: int = 0, end: int | None = None) -> nn.Sequential:
        """Layers `first` to `end`, with the initial weights that every party's copy has."""
        built = []
        for index, factory in itertools.islice(enumerate(self.factories), first, end):
            with pp.layer_rng(SEED, index):
                built.append(factory())
        return nn.Sequential(*built)

    def half(self, rank: int) -> nn.Sequential:
        """Return a stage of the two."""
        return self.layers(self.cut) if rank else self.layers(0, self.cut)

    def batch(self, step: int) -> Batch:
        """The batch of a step, a pure function of it."""
        return _pool(self)[step % _POOL]

    def model(self) -> pp.Model:
        """The same as lp_pipe takes it; its stages build their own layers."""
        layers = [pp.Layer(factory, name=f"layer{index}") for index, factory in enumerate(self.factories)]
        return pp.Model(layers, loss=loss, optimizer=self.optimizer, seed=SEED)


@functools.cache
def _pool(workload: Workload) -> list[Batch]:
    return [workload.make_batch(torch.Generator().manual_seed(index)) for index in range(_POOL)]


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy; class scores are in the last dimension."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


class Block(nn.Module):
    """Pre-norm transformer block: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.query_key_value(self.attention_norm(x_BTD)).unflatten(-1, (3, self._heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.attention_out(attended.transpose(1, 2).flatten(2))
        mlp: Tensor = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + mlp


class Embedding(nn.Module):
    """Tokens and learned positions: [B, T] -> [B, T, D]."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(context, width))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens_BT)
        return embedded + self.positions


def _hidden(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def _head(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _VOCABULARY))


def _vectors(size: int, width: int, generator: torch.Generator) -> Batch:
    targets = torch.randint(width, (size,), generator=generator)
    return torch.randn(size, width, generator=generator), targets


def _tokens(size: int, context: int, generator: torch.Generator) -> Batch:
    windows_BT = torch.randint(_VOCABULARY, (size, context + 1), generator=generator)
    return windows_BT[:, :-1].contiguous(), windows_BT[:, 1:].contiguous()


def _sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _adamw(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def mlp(width: int, batch_size: int, depth: int = 8) -> Workload:
    """Equal layers; the cut is in the middle."""
    hidden: list[Factory] = [functools.partial(_hidden, width)] * (depth - 1)
    layers: tuple[Factory, ...] = (*hidden, functools.partial(nn.Linear, width, width))
    return Workload("mlp", layers, depth // 2, batch_size, functools.partial(_vectors, batch_size, width), _sgd)


def gpt(width: int, batch_size: int, context: int, depth: int = 4, name: str = "gpt") -> Workload:
    """Embedding, transformer blocks, scores of the next token; the cut is in the middle of the blocks."""
    blocks: list[Factory] = [functools.partial(Block, width, 4)] * depth
    ends: list[Factory] = [functools.partial(Embedding, context, width), functools.partial(_head, width)]
    layers = (ends[0], *blocks, ends[1])
    return Workload(name, layers, 1 + depth // 2, batch_size, functools.partial(_tokens, batch_size, context), _adamw)


MODELS: dict[str, Workload] = {
    "mlp": mlp(width=1024, batch_size=128),
    "gpt": gpt(width=128, batch_size=16, context=128),
    "gpt_wide": gpt(width=256, batch_size=16, context=128, name="gpt_wide"),
}
QUICK_MODELS: dict[str, Workload] = {
    "mlp": mlp(width=32, batch_size=16, depth=4),
    "gpt": gpt(width=16, batch_size=8, context=8, depth=2),
}
