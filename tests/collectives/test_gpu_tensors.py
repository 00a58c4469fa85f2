"""Exact backends reduce tensors of a GPU through the host's memory. A stand-in for them tells when it is copied."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lp_pipe.collectives.backend import Backend
from tests.collectives.joined import Joined

COUNT = 3


class GpuTensor(Tensor):
    """A tensor that is not on the CPU, as far as anybody asks; arithmetic with it fails, copies work."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def cpu(self, *_: Any) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).clone()

    def to(self, device: torch.device) -> Tensor:  # type: ignore[override]  # the one form that is used
        assert device.type == "cpu"
        return self.cpu()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.add, Tensor.add_, Tensor.numpy, torch.Tensor.__add__), "computed on the CPU"
        return super().__torch_function__(function, types, args, kwargs or {})


def on_gpu(rank: int, numel: int = 6) -> Tensor:
    return torch.arange(numel, dtype=torch.float32).add(10 * rank).as_subclass(GpuTensor)


def all_operations(backend: Backend) -> list[list[float]]:
    rank = backend.rank
    reduced, sent, part = on_gpu(rank), on_gpu(rank), on_gpu(0, 2)
    gathered, exchanged = on_gpu(0, COUNT * 6), on_gpu(0)
    backend.all_reduce(reduced)
    backend.broadcast(sent, 1)
    backend.reduce_scatter(part, on_gpu(rank), "mean")
    backend.all_gather(gathered, on_gpu(rank))
    backend.all_to_all(exchanged, on_gpu(rank))
    return [one.as_subclass(Tensor).tolist() for one in (reduced, sent, part, gathered, exchanged)]


@pytest.mark.parametrize("kind", ["inproc", "shm", "direct"])
def test_tensors_of_a_gpu_are_reduced_on_the_host(kind: str) -> None:
    joined = Joined(kind, COUNT)
    try:
        results = joined.run(all_operations)
    finally:
        joined.close()
    of_ranks = [[10.0 * rank + index for index in range(6)] for rank in range(COUNT)]
    total = [sum(column) for column in zip(*of_ranks, strict=True)]
    for rank, (reduced, sent, part, gathered, exchanged) in enumerate(results):
        assert reduced == total and sent == of_ranks[1]
        assert part == [value / COUNT for value in total[2 * rank : 2 * rank + 2]]
        assert gathered == [value for row in of_ranks for value in row]
        assert exchanged == [value for row in of_ranks for value in row[2 * rank : 2 * rank + 2]]
