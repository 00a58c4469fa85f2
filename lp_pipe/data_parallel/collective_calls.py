"""Collectives among workers in the user's code: on pytrees of tensors, and differentiable.

The gradient that a worker gets is that of the sum of all workers' losses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.collectives.group import Group
from lp_pipe.errors import DataParallelError
from lp_pipe.private_torch import pytree

# Runs an operation of the group; None: the operation has no meaning, because workers change in this step.
Run = Callable[[Callable[[Group], list[Tensor]]], list[Tensor] | None]


class CollectiveCalls:
    """The collectives among some workers.

    run: runs an operation on the group, or returns None in a step whose collectives have no meaning.
    """

    def __init__(self, run: Run, world_size: Callable[[], int], rank: Callable[[], int]) -> None:
        self._run = run
        self._world_size = world_size
        self._rank = rank

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        """Return the "sum", "mean", "min" or "max" of all workers' tensors."""

        def backward(gradients: list[Tensor], given: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
            summed = self._reduced(gradients, "mean" if op == "mean" else "sum")
            if op in ("sum", "mean"):
                return summed
            return [gradient * (x == y) for gradient, x, y in zip(summed, given, results, strict=True)]

        return self._apply(lambda tensors: self._reduced(tensors, op), backward, x, "all_reduce")

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Return the tensors of worker `root`."""
        if not 0 <= root < self._world_size():
            raise DataParallelError(f"broadcast(root={root}): there are {self._world_size()} workers")

        def forward(tensors: list[Tensor]) -> list[Tensor]:
            found = self._run(lambda group: list(group.broadcast(tensors, root)))
            return [tensor.clone() for tensor in tensors] if found is None else found

        def backward(gradients: list[Tensor], *_: Any) -> list[Tensor]:
            summed = self._reduced(gradients, "sum")
            return summed if self._rank() == root else [torch.zeros_like(gradient) for gradient in summed]

        return self._apply(forward, backward, x, "broadcast")

    def all_gather(self, x: Any) -> Any:
        """Return the tensors of all workers, stacked in a new dimension 0."""

        def backward(gradients: list[Tensor], *_: Any) -> list[Tensor]:
            return [part.squeeze(0) for part in self._scattered(gradients, "sum")]

        return self._apply(self._gathered, backward, x, "all_gather")

    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        """Return this worker's part of the reduced tensors, which are cut along dimension 0."""

        def backward(gradients: list[Tensor], given: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
            spread = [whole.flatten(0, 1) for whole in self._gathered(gradients)]
            if op == "mean":
                return [gradient / self._world_size() for gradient in spread]
            if op == "sum":
                return spread
            reduced = [whole.flatten(0, 1) for whole in self._gathered(list(results))]
            return [gradient * (x == y) for gradient, x, y in zip(spread, given, reduced, strict=True)]

        return self._apply(lambda tensors: self._scattered(tensors, op), backward, x, "reduce_scatter")

    def all_to_all(self, x: Any) -> Any:
        """Return this worker's part of each worker's tensors, which are cut along dimension 0, in rank order."""
        return self._apply(self._exchanged, lambda gradients, *_: self._exchanged(gradients), x, "all_to_all")

    def map_reduce(self, fn: Callable[[Any], Any], x: Any, op: str = "sum") -> Any:
        """Return the reduced results of `fn(x)` on all workers."""
        return self.all_reduce(fn(x), op)

    def barrier(self) -> None:
        """Wait until all workers have called this."""

        def wait(group: Group) -> list[Tensor]:
            group.backend.barrier()
            return []

        self._run(wait)

    def _reduced(self, tensors: list[Tensor], op: str) -> list[Tensor]:
        found = self._run(lambda group: list(group.all_reduce(tensors, op)))
        return [tensor.clone() for tensor in tensors] if found is None else found

    def _gathered(self, tensors: list[Tensor]) -> list[Tensor]:
        found = self._run(lambda group: list(group.all_gather(tensors)))
        return [torch.stack([tensor] * self._world_size()) for tensor in tensors] if found is None else found

    def _scattered(self, tensors: list[Tensor], op: str) -> list[Tensor]:
        found = self._run(lambda group: list(group.reduce_scatter(tensors, op)))
        return [tensor[: len(tensor) // self._world_size()].clone() for tensor in tensors] if found is None else found

    def _exchanged(self, tensors: list[Tensor]) -> list[Tensor]:
        found = self._run(lambda group: list(group.all_to_all(tensors)))
        return [tensor.clone() for tensor in tensors] if found is None else found

    def _apply(
        self, forward: Callable[[list[Tensor]], list[Tensor]], backward: Callable[..., list[Tensor]], x: Any, name: str
    ) -> Any:
        leaves, structure = pytree.tree_flatten(x)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise DataParallelError(f"replica.{name} takes a pytree of tensors, got a {type(leaf).__name__} in it")
        apply: Callable[..., tuple[Tensor, ...]] = _Collective.apply
        return pytree.tree_unflatten(list(apply(forward, backward, *leaves)), structure)


class _Collective(torch.autograd.Function):
    """A collective with the collective that is its backward."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(forward(list(tensors)))
        ctx.backward_calls = backward
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        given, results = ctx.saved_tensors[: len(gradients)], ctx.saved_tensors[len(gradients) :]
        found = ctx.backward_calls([gradient.contiguous() for gradient in gradients], given, results)
        return None, None, *found
