"""Large tensors are summed between hosts in pieces, with the bits of the sum in rank order, and no rank hangs."""

import random
import time

import pytest
import torch

from lp_pipe.collectives import direct
from lp_pipe.collectives.backend import Backend
from tests.collectives.joined import Joined


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pieces_have_the_bits_of_the_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_PIECE_BYTES", 16)
    sizes = [0, 1, 3, 4 * count, 100, 1001]

    def tensor(rank: int, size: int) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(97 * rank + size))

    def reduce(backend: Backend) -> list[torch.Tensor]:
        rng = random.Random(backend.rank)
        found = []
        for size in sizes:
            time.sleep(rng.random() * 0.003)  # ranks come at other times
            own = tensor(backend.rank, size)
            backend.all_reduce(own)
            found.append(own)
        return found

    joined = Joined("direct", count)
    try:
        results = joined.run(reduce)
    finally:
        joined.close()
    for index, size in enumerate(sizes):
        expected = tensor(0, size)
        for rank in range(1, count):
            expected = expected + tensor(rank, size)
        assert all(torch.equal(result[index], expected) for result in results)
