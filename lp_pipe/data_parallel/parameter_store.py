"""A server's shard of the parameters with mode="async", and the optimizer that updates it.

    worker 0   gradient 7 of worker 0 ──► server: applied; version 7 → 8 ──► parameters of version 8
    worker 1   gradient 5 of worker 1 ──► server: applied; version 8 → 9 ──► parameters of version 9; staleness 3
    worker 1   gradient 5 of worker 1 ──► server: dropped, it has that one ──► parameters of version 9

Workers number their gradients, so that a server applies each one once, also when a worker was started again and
computes the last one anew. A server that may be started again keeps a copy of its state on the next server, its mirror.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), 3.4 and 4.3.
"""

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lp_pipe.collectives.compression import Compression
from lp_pipe.errors import Unavailable
from lp_pipe.rpc import CourierClient
from lp_pipe.rpc.changes import Changes


class Gradient(NamedTuple):
    """A worker's gradient of one server's shards.

    optimizer: its number, the same on all workers. number: of the gradient, among this worker's for this optimizer.
    step: of the worker's loop.
    options: of the optimizer's groups, as the worker has them now.
    forms: by parameter: a tensor, or the tensors of its compressed form; None: the parameter has no gradient.
    """

    optimizer: int
    rank: int
    number: int
    step: int
    options: list[dict[str, Any]]
    forms: list[list[Tensor] | None]


class Applied(NamedTuple):
    """A server's answer.

    forms: by parameter: its values; or, unless is_whole, the compressed change since the worker's last answer.
    version: the number of gradients that the parameters have had applied.
    mirrored: the number of this worker's gradients that the next server's copy of the state contains.
    """

    forms: list[list[Tensor]]
    version: int
    mirrored: int
    is_whole: bool


class WorkerProgress(NamedTuple):
    """A worker's place in its loop, from which its successor goes on.

    step: the next one. gradients: by optimizer, how many the worker has made before that step.
    state: of all that servers do not hold, such as schedulers and buffers.
    first_steps: by replica, the first step whose gradient is still to be made; None: of all it is this one.
    """

    step: int
    gradients: tuple[int, ...]
    state: dict[str, Any]
    first_steps: dict[int, int] | None = None


class MirrorPlace(NamedTuple):
    """Where a server keeps the copy of its state. place: of that server. every: after how many gradients."""

    place: int
    server: CourierClient
    every: int


class StoreCut(NamedTuple):
    """A server's state at a moment at which all servers have applied the same gradients.

    parameters, states: by optimizer, those of each shard. applied, last_steps: by optimizer and rank.
    """

    parameters: dict[int, list[Tensor]]
    states: dict[int, list[dict[str, Any]]]
    applied: dict[int, dict[int, int]]
    last_steps: dict[int, dict[int, int]]
    progress: dict[int, WorkerProgress]


@dataclass
class HeldOptimizer:
    """An optimizer over a server's shards.

    applied: the number of applied gradients, and last_steps: the step of the last one, by the workers' ranks.
    """

    optimizer: torch.optim.Optimizer
    applied: dict[int, int]
    last_steps: dict[int, int]
    version: int = 0


@dataclass
class _State:
    """All that a server must not lose. changes: grows with each."""

    held: dict[int, HeldOptimizer] = field(default_factory=dict)  # by the optimizer's number
    progress: dict[int, WorkerProgress] = field(default_factory=dict)  # by rank
    compression: Compression | None = None
    is_open: bool = False
    finished: dict[int, int] = field(default_factory=dict)  # steps, by rank
    left: set[int] = field(default_factory=set)  # ranks
    changes: int = 0


class ParameterStore:
    """A server's shards, served to the workers. Its methods run in one event loop, so they need no lock.

    Calls that need a state return None where there is none, or not enough of it, because this server was started again.

    on_end: called once `train` has returned on all workers.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._state = _State()
        self._changes = Changes()
        self._views: dict[tuple[int, int], list[Tensor]] = {}  # what workers know of the parameters, with compression
        self._mirror: MirrorPlace | None = None
        self._mirroring = asyncio.Lock()
        self._mirrored_changes = 0
        self._mirrored: dict[int, dict[int, int]] = {}  # as `applied`, in the mirror
        self._of_others: dict[int, tuple[int, bytes]] = {}  # other servers' states, by their places
        self._limit: dict[int, dict[int, int]] | None = None  # as `applied`; gradients beyond wait

    # ---- the beginning ----

    async def has_begun(self) -> bool:
        return bool(self._state.held)

    async def is_open(self) -> bool:
        """Return whether workers may train."""
        return self._state.is_open

    async def wait_until_open(self) -> None:
        """Return once workers may train, or the program stops."""
        while not self._state.is_open and await self._changes.wait():
            pass

    async def begin(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        applied: Mapping[int, int],
        last_steps: Mapping[int, int],
        compression: Compression | None,
        mirror: MirrorPlace | None,
    ) -> None:
        """Take an optimizer over this server's shards, unless one with this number is there."""
        if number not in self._state.held:
            self._state.held[number] = HeldOptimizer(optimizer, dict(applied), dict(last_steps))
            self._state.compression = compression
            self._mirror = mirror
            await self._changed(at_once=True)

    async def open(self, progress: Mapping[int, WorkerProgress]) -> None:
        """Let the workers train, from these places in their loops."""
        if not self._state.is_open:
            self._state.is_open = True
            self._state.progress = dict(progress)
            await self._changed(at_once=True)
            self._changes.notify()

    async def restore(self, data: bytes, mirror: MirrorPlace | None) -> None:
        """Go on from this server's state before it was started again; only the first call counts."""
        if not self._state.held:
            self._state, self._mirror = pickle.loads(data), mirror
            self._note_mirrored()
            self._changes.notify()

    # ---- training ----

    async def apply_gradient(self, gradient: Gradient, wants_whole: bool) -> Applied | None:
        """Apply a gradient, unless that was done before, and return the newest parameters.

        wants_whole: whether the worker does not know what it was told last. None: gradients before this one are
        missing.
        """
        held = self._state.held.get(gradient.optimizer)
        if held is None:
            return None
        while self._limit is not None and gradient.number >= self._limit[gradient.optimizer].get(gradient.rank, 0):
            await self._wait_for_change()
        applied = held.applied.get(gradient.rank, 0)
        if gradient.number > applied:
            return None
        if gradient.number == applied:
            self._apply(held, gradient)
            await self._changed()
        return self._answer(gradient.optimizer, held, gradient.rank, is_whole=wants_whole)

    async def newest_parameters(self, number: int, rank: int) -> Applied | None:
        """Return the parameters as they are now."""
        held = self._state.held.get(number)
        return None if held is None else self._answer(number, held, rank, is_whole=True)

    async def note_progress(self, rank: int, progress: WorkerProgress) -> None:
        """Take note of a worker's place in its loop, unless this server has lost gradients before it."""
        held, known = self._state.held, self._state.progress.get(rank)
        has_all = all(held[number].applied.get(rank, 0) >= count for number, count in enumerate(progress.gradients))
        if self._state.is_open and has_all and (known is None or progress.step >= known.step):
            self._state.progress[rank] = progress

    async def progress_of(self, rank: int) -> WorkerProgress | None:
        """Return from where a worker that was started again goes on."""
        return self._state.progress.get(rank) if self._state.is_open else None

    async def note_finished(self, rank: int, step: int) -> bool | None:
        """Note that a worker has made all steps before this one."""
        if not self._state.held:
            return None
        self._state.finished[rank] = step
        await self._changed(at_once=True)
        self._changes.notify()
        return True

    async def leave(self, rank: int, workers: int) -> bool | None:
        """Note that `train` has returned on a worker; once it has on all, `on_end` is called."""
        self._state.left.add(rank)
        await self._changed(at_once=True)
        if len(self._state.left) == workers:
            self._on_end()
        return True

    async def wait_until_finished(self, step: int, workers: int) -> bool | None:
        """Return once so many workers have made all steps before this one; False: the program stops."""
        while self._state.held and sum(own >= step for own in self._state.finished.values()) < workers:
            if not await self._changes.wait():
                return False
        return True if self._state.held else None

    # ---- a consistent cut of all servers ----

    async def pause(self) -> dict[int, dict[int, int]] | None:
        """Let gradients wait from now on; return the numbers of applied ones, by optimizer and rank."""
        if not self._state.is_open:
            return None
        self._limit = self._applied()
        return self._limit

    async def cut(self, limit: dict[int, dict[int, int]]) -> StoreCut | None:
        """Apply the gradients up to this limit, which other servers have, and return the state then.

        Raises:
            Unavailable: the program stops.
        """
        if self._limit is None:
            return None
        self._limit = limit
        self._changes.notify()
        while self._applied() != limit:
            await self._wait_for_change()
        parameters = {number: _values_of(held.optimizer) for number, held in self._state.held.items()}
        states = {
            number: [dict(held.optimizer.state.get(one, {})) for one in parameters_of(held.optimizer)]
            for number, held in self._state.held.items()
        }
        last_steps = {number: dict(held.last_steps) for number, held in self._state.held.items()}
        return StoreCut(parameters, states, limit, last_steps, dict(self._state.progress))

    async def resume(self) -> None:
        """Let gradients come again."""
        self._limit = None
        self._changes.notify()

    # ---- copies of states ----

    async def keep_mirror(self, place: int, changes: int, data: bytes) -> None:
        """Keep the state of the server at a place, unless a newer one is here."""
        if place not in self._of_others or changes >= self._of_others[place][0]:
            self._of_others[place] = changes, data

    async def mirror_of(self, place: int) -> bytes | None:
        """Return the state of the server at a place."""
        return self._of_others[place][1] if place in self._of_others else None

    async def mirror_again(self) -> None:
        """Copy the state to the next server, which has lost its copy."""
        if self._state.held:
            await self._changed(at_once=True)

    async def _changed(self, *, at_once: bool = False) -> None:
        """Count a change, and copy the state to the next server if it is time."""
        self._state.changes += 1
        own, mirror = self._state.changes, self._mirror
        if mirror is None or (not at_once and own - self._mirrored_changes < mirror.every):
            return
        async with self._mirroring:
            if self._mirrored_changes >= own:
                return  # the copy that another change has waited for contains this one
            changes, applied = self._state.changes, self._applied()
            data = pickle.dumps(self._state)
            with contextlib.suppress(Unavailable):  # then workers keep their gradients until the next copy
                await mirror.server.aio.keep_mirror(mirror.place, changes, data)
                self._mirrored_changes, self._mirrored = changes, applied

    def _note_mirrored(self) -> None:
        self._mirrored_changes, self._mirrored = self._state.changes, self._applied()

    def _applied(self) -> dict[int, dict[int, int]]:
        return {number: dict(held.applied) for number, held in self._state.held.items()}

    # ---- one gradient ----

    def _apply(self, held: HeldOptimizer, gradient: Gradient) -> None:
        for parameter, form in zip(parameters_of(held.optimizer), gradient.forms, strict=True):
            parameter.grad = None if form is None else self._decoded(form, parameter)
        for group, own in zip(held.optimizer.param_groups, gradient.options, strict=True):
            group.update(own)
        held.optimizer.step()
        for parameter in parameters_of(held.optimizer):
            parameter.grad = None  # else mirrors would have them
        held.applied[gradient.rank] = gradient.number + 1
        held.last_steps[gradient.rank] = gradient.step
        held.version += 1
        self._changes.notify()

    def _decoded(self, form: Sequence[Tensor], parameter: Tensor) -> Tensor:
        compression = self._state.compression
        return form[0] if compression is None else compression.decode(form, parameter.numel()).to(parameter.dtype)

    def _answer(self, number: int, held: HeldOptimizer, rank: int, *, is_whole: bool) -> Applied:
        mirrored = self._mirrored if self._mirror is not None else self._applied()
        count = mirrored.get(number, {}).get(rank, 0)
        compression = self._state.compression
        views = self._views.get((number, rank))
        if compression is None or is_whole or views is None:
            values = _values_of(held.optimizer)
            if compression is not None:
                self._views[number, rank] = [value.clone() for value in values]
            return Applied([[value] for value in values], held.version, count, True)
        forms = []
        for parameter, view in zip(parameters_of(held.optimizer), views, strict=True):
            form = compression.encode(parameter.detach() - view)
            view.add_(compression.decode(form, view.numel()).to(view.dtype))  # what is left out comes next time
            forms.append(form)
        return Applied(forms, held.version, count, False)

    async def _wait_for_change(self) -> None:
        if not await self._changes.wait():
            raise Unavailable("the program stops")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _values_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters_of(optimizer)]
