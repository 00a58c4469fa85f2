"""Batch normalization over the samples of all replicas."""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lp_pipe.context import NodeContext, context
from lp_pipe.data_parallel.collective_calls import CollectiveCalls


class NormalizesBatches(CollectiveCalls):
    """A worker whose shards may be normalized together."""

    @abstractmethod
    def why_not_normalized(self) -> str:
        """Return why statistics of the whole batch cannot be had now; "" if they can."""


# The worker that runs in a node, for modules: they are built without it.
worker_of_node: dict[NodeContext, NormalizesBatches] = {}


class BatchNorm(nn.Module):
    """Normalizes as torch's BatchNorm1d, 2d and 3d, with the mean and variance of the whole batch, over all replicas.

    Within 1e-6 of one process; not equal to the bit. In train mode it needs a worker for each replica, and one shard
    of each replica (microbatches=1), at any number of samples.

    Raises (in forward): RuntimeError: there are other numbers of workers or of shards.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        worker = worker_of_node.get(context())
        if worker is None:
            raise RuntimeError(
                "dp.BatchNorm trains only in the function of dp.add_replicas: use nn.BatchNorm elsewhere"
            )
        if reason := worker.why_not_normalized():
            raise RuntimeError(f"dp.BatchNorm: {reason}")
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        own_count = x.new_tensor([x.numel() // x.shape[1]])
        total, count = worker.all_reduce((x.sum(dims), own_count))
        mean = total / count
        centred = x - mean.view(shape)
        variance = worker.all_reduce(centred.square().sum(dims)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
            self.num_batches_tracked += 1
        normal: Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is None or self.bias is None:
            return normal
        return normal * self.weight.view(shape) + self.bias.view(shape)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}"
