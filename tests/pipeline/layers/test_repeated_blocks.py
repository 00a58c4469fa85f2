"""split_points="auto": which submodules are the blocks that a module repeats."""

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layers.splitting import repeated_blocks

D = 8


def _numbers(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


class Block(nn.Module):
    def __init__(self, size: int = D) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """An embedding before the blocks, and a head of two layers, which are no blocks beside them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(11, D)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(D, 2), nn.ReLU(), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Level(nn.Module):
    def __init__(self, blocks: int, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.widen = nn.Linear(size, 2 * size)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.widen(x)  # type: ignore[no-any-return]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(weight * expert(x) for weight, expert in zip(self.gate(x).mT, self.experts, strict=True))


class Decoders(nn.Module):
    """No repeated blocks under a list that has no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))


def _transformer() -> nn.Module:
    return nn.Transformer(D, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=16, batch_first=True)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Decoder(2), _numbers("layers", 2)),
        (Decoder(5), _numbers("layers", 5)),
        (_transformer(), [*_numbers("encoder.layers", 2), *_numbers("decoder.layers", 3)]),
        (nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU()), ["0", "2"]),
        # Levels of different sizes, as in a Swin transformer or a ResNet: the blocks within.
        (
            nn.Sequential(Level(1, D), Level(3, 2 * D), Level(1, 4 * D), Level(2, 8 * D)),
            [f"{level}.blocks.{i}" for level, blocks in enumerate([1, 3, 1, 2]) for i in range(blocks) if blocks > 1],
        ),
        # Experts are no steps one after the other: the layers that have them.
        (nn.ModuleList(Experts() for _ in range(4)), ["0", "1", "2", "3"]),
        (Decoders(), ["groups.0.0", "groups.0.1", "groups.1.0", "groups.1.1"]),
        (nn.Linear(D, D), []),
    ],
    ids=["two layers", "five layers", "encoder and decoder", "mlp", "levels", "experts", "lists of lists", "none"],
)
def test_blocks(module: nn.Module, names: list[str]) -> None:
    assert repeated_blocks(module) == names


def test_a_module_is_cut_before_each_of_its_blocks() -> None:
    module, x = Decoder(3), torch.randint(11, (4, 5))
    pieces = pp.split(module, x, "auto")
    assert len(pieces) == 4
    assert torch.equal(pp.Sequential(pieces)(x), module(x))


def test_a_module_that_begins_with_a_block_has_no_empty_piece() -> None:
    module, x = nn.Sequential(Block(), Block(), Block()), torch.randn(4, D)
    pieces = pp.split(module, x, "auto")
    assert len(pieces) == 3
    assert torch.equal(pp.Sequential(pieces)(x), module(x))


class UsesOneLess(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in list(self.layers)[:-1]:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_blocks_that_forward_does_not_call_make_no_piece() -> None:
    assert len(pp.split(UsesOneLess(4), torch.randint(11, (4, 5)), "auto")) == 4


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(pp.PipelineError, match="split_points='auto': Linear has no"):
        pp.split(nn.Linear(D, D), torch.randn(4, D), "auto")
