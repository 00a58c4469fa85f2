"""Updates of parameters whose sums are still on their way: each is made before the parameter is next read."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lp_pipe.collectives.push_pull import PendingSum
from lp_pipe.private_torch import watch_parameters


class LateSum(NamedTuple):
    """The sum of some gradients. gradients: where each one will be, by parameter; without those that have none."""

    pending: PendingSum
    gradients: Mapping[nn.Parameter, Tensor]


class LateUpdates:
    """The updates of one step of an optimizer whose update of a parameter depends on that parameter only.

    A parameter is updated with the options of its step (learning rate), which a scheduler may have changed since. Reads
    are noticed if they go through the model: `module.weight`, `model.parameters()`, `state_dict()`.

    Source: cross-barrier, section 5 of Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
    Acceleration" (SOSP 2019).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._lock = threading.RLock()
        self._late: dict[nn.Parameter, LateSum] = {}
        self._options: list[dict[str, Any]] = []
        self._is_watched: bool | None = None
        self._is_own_read = False

    def are_possible(self) -> bool:
        """Return whether reads of the model's parameters are noticed."""
        if self._is_watched is None:
            self._is_watched = all(watch_parameters(one, self._before_read) for one in self._model.modules())
        return self._is_watched

    def begin(self, sums: Sequence[LateSum]) -> None:
        """Update the parameters of these sums later, as the optimizer would do now."""
        self.finish()
        self._options = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in self._optimizer.param_groups
        ]
        self._late = {parameter: late for late in sums for parameter in late.gradients}

    def finish(self) -> None:
        """Make all updates that are left."""
        with self._lock:
            while self._late:
                self._update(next(iter(self._late)))

    @property
    def is_left(self) -> bool:
        """Whether an update is left."""
        return bool(self._late)

    def is_late(self, parameter: Tensor) -> bool:
        """Return whether the parameter still has to be updated."""
        return parameter in self._late

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Let the body get parameters from the model without waiting for their updates."""
        self._is_own_read, before = True, self._is_own_read
        try:
            yield
        finally:
            self._is_own_read = before

    def _before_read(self, parameter: nn.Parameter) -> None:
        if self._late and not self._is_own_read:
            with self._lock:
                if parameter in self._late:
                    self._update(parameter)

    def _update(self, parameter: nn.Parameter) -> None:
        """Wait for a parameter's sum, and make the updates of all sums that are complete by then."""
        self._late[parameter].pending.wait()
        complete = {one: late for one, late in self._late.items() if late.pending.is_complete}
        for late in complete.values():
            late.pending.wait()  # on a GPU this copies the sum there
        ready = {one: late.gradients[one] for one, late in complete.items()}
        before = {one: one.grad for one in ready}
        groups = self._optimizer.param_groups
        try:
            for one, gradient in ready.items():
                one.grad = gradient
            chosen = [[one for one in options["params"] if one in ready] for options in self._options]
            self._optimizer.param_groups = [
                {**options, "params": own} for options, own in zip(self._options, chosen, strict=True) if own
            ]
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
            for one, kept in before.items():
                one.grad = kept
        for one in ready:
            del self._late[one]
