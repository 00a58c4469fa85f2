"""Asynchronous training: servers hold the parameters and the optimizer, and apply each gradient as it comes.

    worker 0   gradient of version 7 ──► server: version 7 → 8 ──► parameters of version 8
    worker 1   gradient of version 5 ──► server: version 8 → 9 ──► parameters of version 9; staleness 3

Each server has a shard of every parameter, so an update must treat elements independently.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014).
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.errors import NotSupported
from lp_pipe.training.state_shards import flat, is_dense


class Applied(NamedTuple):
    """A server's answer. version: the number of gradients that its parameters have had applied."""

    parameters: list[Tensor]
    version: int


class ParameterStore:
    """A shard of all parameters with its optimizer. Served to the workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._optimizers: dict[int, torch.optim.Optimizer] = {}  # by the number that workers give them
        self._versions: dict[int, int] = {}
        self._steps: dict[tuple[int, int], int] = {}  # applied gradients, by optimizer and rank

    def begin_parameters(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer over the shards; the first worker's counts, and all give the same."""
        with self._lock:
            if number not in self._optimizers:
                self._optimizers[number], self._versions[number] = optimizer, 0

    def apply_gradient(
        self, number: int, rank: int, step: int, options: list[dict[str, Any]], gradients: list[Tensor | None]
    ) -> Applied:
        """Apply a worker's gradient with its optimizer's options of now; one that was applied before does nothing."""
        with self._lock:
            optimizer = self._optimizers[number]
            if step == self._steps.get((number, rank), 0):
                for parameter, gradient in zip(_parameters_of(optimizer), gradients, strict=True):
                    parameter.grad = gradient
                for group, own in zip(optimizer.param_groups, options, strict=True):
                    group.update(own)
                optimizer.step()
                self._steps[number, rank] = step + 1
                self._versions[number] += 1
            return self._newest(number)

    def newest_parameters(self, number: int) -> Applied:
        """Return the parameters as they are now."""
        with self._lock:
            return self._newest(number)

    def _newest(self, number: int) -> Applied:
        found = [parameter.detach().clone() for parameter in _parameters_of(self._optimizers[number])]
        return Applied(found, self._versions[number])


class AsyncParameters:
    """A worker's view of an optimizer's parameters that servers hold.

    number: of the optimizer, the same on all workers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, workers: ReplicaWorkers) -> None:
        """Give the servers the optimizer, if they do not have it yet.

        Raises:
            NotSupported: a parameter has gaps in its memory.
        """
        self._optimizer = optimizer
        self._number, self._rank = number, workers.membership.rank
        self._servers = workers.servers
        self._stores = cast(list[ParameterStore], list(self._servers))  # for mypy: each call is one of that class
        self._node = workers.node
        self._steps = 0
        count = len(self._servers)
        self._versions = [0] * count
        parameters = _parameters_of(optimizer)
        if not all(is_dense(parameter) for parameter in parameters):
            raise NotSupported("mode='async': a parameter is a view with gaps in its memory")
        self._shards = [[_shard(parameter, place, count) for parameter in parameters] for place in range(count)]
        for store, shards in zip(self._stores, self._shards, strict=True):
            store.begin_parameters(number, _optimizer_over(optimizer, shards))

    def apply_gradients(self, step: int) -> None:
        """Send the gradients, wait until they are applied, and take the newest parameters."""
        whole = [_in_order_of(parameter) for parameter in _parameters_of(self._optimizer)]
        options = [_options_of(group) for group in self._optimizer.param_groups]
        calls = []
        for place, server in enumerate(self._servers):
            gradients = [_shard(one, place, len(self._servers)) if one is not None else None for one in whole]
            calls.append(server.futures.apply_gradient(self._number, self._rank, self._steps, options, gradients))
        self._steps += 1
        applied: list[Applied] = [call.result() for call in calls]
        others = [one.version - 1 - own for one, own in zip(applied, self._versions, strict=True)]
        self._node.services.log_metrics({"staleness": sum(others) / len(others)}, step)
        self._take(applied)

    def take_newest(self) -> None:
        """Take the newest parameters."""
        self._take([store.newest_parameters(self._number) for store in self._stores])

    @torch.no_grad()
    def _take(self, applied: Sequence[Applied]) -> None:
        for own, found in zip(self._shards, applied, strict=True):
            for shard, values in zip(own, found.parameters, strict=True):
                shard.copy_(values)
        self._versions = [found.version for found in applied]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _in_order_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the parameter's gradient, with its elements in memory as those of the parameter."""
    gradient = parameter.grad
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _shard(tensor: Tensor, place: int, count: int) -> Tensor:
    """Return a server's part of a dense tensor, as it lies in memory."""
    numel = tensor.numel()
    return flat(tensor)[numel * place // count : numel * (place + 1) // count]


def _optimizer_over(optimizer: torch.optim.Optimizer, shards: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return a copy of the optimizer that updates copies of these shards, in place of its parameters."""
    found = copy.copy(optimizer)
    rest = iter(shards)
    found.param_groups = [
        {**_options_of(group), "params": [nn.Parameter(next(rest).clone()) for _ in group["params"]]}
        for group in optimizer.param_groups
    ]
    found.state = defaultdict(dict)
    return found
