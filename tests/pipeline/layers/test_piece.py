"""A graph that has travelled computes in each call what the module does."""

import cloudpickle
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp

D = 6


class Noisy(nn.Module):
    """A module with operations that depend on no input: they draw, or make memory to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        is_kept = (torch.rand(()) < 0.5).float()  # stochastic depth
        total = torch.zeros(D)
        total += x.detach().sum(0)
        with torch.no_grad():
            noise = torch.randn(D) * torch.tensor([0.5])
        y: Tensor = self.second(self.first(x) * is_kept + total + noise)
        return y[:, torch.randperm(D)]


def test_what_depends_on_no_input_is_computed_in_each_call() -> None:
    # torch unpickles a graph by tracing its code, which ran these once: in processes all steps had the same draws.
    module = Noisy()
    there = cloudpickle.loads(cloudpickle.dumps(pp.split(module, torch.randn(4, D), ["second"])))
    x = torch.randn(5, D)
    for layers in (there, cloudpickle.loads(cloudpickle.dumps(there))):
        for seed in range(5):
            torch.manual_seed(seed)
            want = module(x)
            torch.manual_seed(seed)
            assert torch.equal(pp.Sequential(layers)(x), want)
