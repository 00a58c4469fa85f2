"""The optimizer that a training loop steps: it sums the gradients of all replicas before the user's optimizer runs."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.collectives.backend import Call
from lp_pipe.data_parallel.buckets import Exchange, GradientBuckets
from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.errors import DataParallelError, NotSupported

_UPDATED = Call("updated parameters")


class ReplicaOptimizer(torch.optim.Optimizer):
    """An optimizer that wraps the user's, with the same groups and the same state; torch's LR schedulers take it."""

    # The base's __init__ is not called: groups, state and hooks are those of the wrapped optimizer.
    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        sum_and_apply: Callable[["ReplicaOptimizer"], bool],
        clip_grad_norm: float | None,
        bucket_bytes: int,
        workers: ReplicaWorkers,
        zero: int = 0,
    ) -> None:
        """zero: 1: each worker keeps the state of a share of the parameters, and updates those.

        Raises:
            DataParallelError: the optimizer's parameters are not the model's.
        """
        self.inner = inner
        self._sum_and_apply = sum_and_apply
        self.model = model
        self._clip_grad_norm = clip_grad_norm
        self._bucket_bytes = bucket_bytes
        self._workers = workers
        self.is_sharded = zero == 1
        self._whole: dict[str, Any] | None = None  # the state of all workers, while rank 0 saves it
        self._buckets: GradientBuckets | None = None
        self._exchange: Exchange | None = None
        self._extra_flags: Callable[[], list[float]] = list
        self._layout: list[str] = []
        self._undo: Callable[[], None] | None = None
        self.named_parameters()  # refuses strange ones

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"ReplicaOptimizer({self.inner!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # the wrapped optimizer's
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state; with zero=1 all workers must call this."""
        if not self.is_sharded:
            return self.inner.state_dict()
        if self._whole is not None:
            return self._whole
        self._drop_others_state()
        own = self.inner.state_dict()
        parts = self._workers.gathered(own["state"])
        return {**own, "state": {index: state for part in parts for index, state in part.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Let one worker alone call `state_dict` in the body, which all workers enter."""
        self._whole = self.state_dict()
        try:
            yield
        finally:
            self._whole = None

    def own_state(self) -> dict[str, Any]:
        """Return the state that this worker has."""
        return self.inner.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the replica whose turn it is. `step` leaves none, so no loop needs this."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        self.named_parameters()

    def step(self, closure: Any = None) -> bool:  # type: ignore[override]  # torch's returns the closure's loss
        """Sum the gradients of all replicas, commit the step and update; False: the step was dropped and comes again.

        Raises:
            DataParallelError: there is a closure, or the workers have not all done the same.
            CollectiveMismatch: another worker makes another call.
        """
        if closure is not None:
            raise DataParallelError("optimizer.step(closure) of replicas: compute the loss in the loop over shards")
        return self._sum_and_apply(self)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the optimizer's parameters by their names in the model, in the model's order.

        Raises:
            DataParallelError: one is not the model's.
        """
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if id(parameter) in own]
        if len(named) != len(own):
            strange = own - {id(parameter) for _, parameter in named}
            shapes = [
                list(parameter.shape)
                for group in self.param_groups
                for parameter in group["params"]
                if id(parameter) in strange
            ]
            raise DataParallelError(
                f"{len(shapes)} of the {len(own)} parameters of {type(self.inner).__name__} are not the model's "
                f"(shapes {', '.join(map(str, shapes[:5]))}): give the model that the optimizer was made for"
            )
        return named

    def signature(self) -> list[tuple[str, list[int], str]]:
        """Return names, shapes and dtypes of the parameters and buffers, which must be the same on all workers."""
        named: list[tuple[str, Tensor]] = [*self.named_parameters(), *self.model.named_buffers()]
        return [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in named]

    @property
    def buckets(self) -> GradientBuckets:
        assert self._buckets is not None, "begin_step makes them"
        return self._buckets

    def begin_step(self, exchange: Exchange, extra_flags: Callable[[], list[float]]) -> None:
        """Begin a step among these workers."""
        self._undo = None
        self._drop_others_state()
        if self._buckets is None or exchange != self._exchange:
            self._exchange, self._extra_flags = exchange, extra_flags
            self._make_buckets(self._trained())
        self.buckets.begin_step()

    def follow_freezing(self) -> None:
        """Make other buckets if parameters were frozen or thawed since; gradients of this step stay."""
        trained = self._trained()
        if [name for name, _ in trained] != self._layout:
            gradients = [(parameter, parameter.grad) for _, parameter in trained]
            self._make_buckets(trained)
            self.buckets.begin_step()
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def drain(self) -> None:
        """Sum all gradients before another collective, if some may be summed already."""
        if self._buckets is not None:
            self._buckets.drain()

    def apply(self, *, keeps_undo: bool) -> None:
        """Clip the summed gradients and step the wrapped optimizer. keeps_undo: `undo` may be called later."""
        if keeps_undo:
            self._undo = self._undoing()
        if self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_([parameter for _, parameter in self.named_parameters()], self._clip_grad_norm)
        if self.is_sharded:
            for parameter in self._others_parameters():
                parameter.grad = None
        self.inner.step()
        self.clear_gradients()

    @torch.no_grad()
    def exchange_updates(self) -> None:
        """Get the parameters that other workers have updated, with zero=1."""
        rank, shares = self._workers.membership.rank, self._shares() if self.is_sharded else []
        for owner, parameters in enumerate(shares):
            if len(shares) == 1 or not parameters:
                continue
            packed = torch.cat([parameter.detach().reshape(-1).view(torch.uint8) for parameter in parameters])
            self._workers.backend.broadcast(packed, owner, call=_UPDATED)
            begin = 0
            for parameter in parameters if owner != rank else ():
                end = begin + parameter.numel() * parameter.itemsize
                parameter.copy_(packed[begin:end].clone().view(parameter.dtype).view(parameter.shape))
                begin = end

    def undo(self) -> None:
        """Take back an update of this step."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def clear_gradients(self) -> None:
        """Leave the gradients of all parameters None."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None

    def _shares(self) -> list[list[nn.Parameter]]:
        """Return which parameters each worker updates: about as many numbers as the others."""
        shares: list[list[nn.Parameter]] = [[] for _ in range(self._workers.membership.world_size)]
        for _, parameter in sorted(self.named_parameters(), key=lambda named: -named[1].numel()):
            min(shares, key=lambda share: sum(one.numel() for one in share)).append(parameter)
        return shares

    def _drop_others_state(self) -> None:
        """Forget what was loaded of parameters that other workers update, with zero=1."""
        for parameter in self._others_parameters() if self.is_sharded else ():
            self.inner.state.pop(parameter, None)

    def _others_parameters(self) -> list[nn.Parameter]:
        rank = self._workers.membership.rank
        return [parameter for owner, share in enumerate(self._shares()) for parameter in share if owner != rank]

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def _make_buckets(self, trained: list[tuple[str, nn.Parameter]]) -> None:
        self.close()
        for name, parameter in trained:
            if parameter.device.type != "cpu":
                raise NotSupported(f"parameter {name!r} is on {parameter.device}: replicas train on the CPU for now")
        assert self._exchange is not None
        self._buckets = GradientBuckets(trained, self._exchange, self._bucket_bytes, self._extra_flags)
        self._layout = [name for name, _ in trained]

    def _undoing(self) -> Callable[[], None]:
        state = copy.deepcopy(self.inner.state_dict())
        weights = [(parameter, parameter.detach().clone()) for _, parameter in self.named_parameters()]

        def undo() -> None:
            self.inner.load_state_dict(state)
            with torch.no_grad():
                for parameter, weight in weights:
                    parameter.copy_(weight)

        return undo
