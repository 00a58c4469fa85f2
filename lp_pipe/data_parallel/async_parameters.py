"""Asynchronous training, as one worker sees it: servers hold the parameters, and apply each gradient as it comes.

Each server has a shard of every parameter, so an update must treat elements independently. What servers do is in
parameter_store.py.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from lp_pipe.collectives.compression import ErrorFeedback
from lp_pipe.context import stop_event
from lp_pipe.data_parallel.optimizer import ReplicaOptimizer
from lp_pipe.data_parallel.parameter_store import (
    Applied,
    Gradient,
    MirrorPlace,
    ParameterStore,
    StoreCut,
    WorkerProgress,
    parameters_of,
)
from lp_pipe.data_parallel.training_state import TrainingState, options_of
from lp_pipe.data_parallel.workers import ReplicaWorkers, TrainingHasEnded, hosted_replicas
from lp_pipe.errors import CheckpointError, DataParallelError, NotSupported, Unavailable
from lp_pipe.training.device import on_host
from lp_pipe.training.state_shards import OwnShardState, flat, is_dense, joined

T = TypeVar("T")
_TRIES = 20
_PAUSE_S = 0.1


class ParameterServers:
    """The servers that hold the parameters. One that was started again gets its state back before it is used."""

    def __init__(self, workers: ReplicaWorkers) -> None:
        self.node = workers.node
        self.clients = list(workers.servers)
        self._stores = cast(list[ParameterStore], self.clients)  # for mypy: each call is one of that class
        self._every = workers.options.mirror_every if workers.options.may_change else 0
        self._unmirrored: list[list[Gradient]] = [[] for _ in self.clients]  # which a server may lose

    @property
    def count(self) -> int:
        return len(self.clients)

    def mirror_of(self, place: int) -> MirrorPlace | None:
        """Return where the server at a place keeps the copy of its state; None: it has none."""
        if not self._every or self.count == 1:
            return None
        return MirrorPlace(place, self.clients[(place + 1) % self.count], self._every)

    def call(self, place: int, ask: Callable[[ParameterStore], Awaitable[T | None]]) -> T:
        """Return a server's answer, which must not be None.

        Raises:
            TrainingHasEnded: the server has ended, because all workers have.
            DataParallelError: its state is lost.
            Unavailable: the program stops.
        """
        for number in range(_TRIES):
            try:
                found = cast("T | None", ask(self._stores[place]))  # a client waits, and returns the result itself
                if found is not None:
                    return found
                self.bring_back(place)
            except Unavailable as error:
                if stop_event().wait(_PAUSE_S):
                    raise
                if number == _TRIES - 1:
                    raise TrainingHasEnded(f"{self.node.name} cannot reach the servers: {error}") from error
        raise self._lost(place)

    def call_all(self, ask: Callable[[ParameterStore], Awaitable[T | None]]) -> list[T]:
        """Return the answers of all servers, one after another; see `call`."""
        return [self.call(place, ask) for place in range(self.count)]

    def apply(self, gradients: Sequence[Gradient], *, want_whole: bool) -> list[Applied]:
        """Let each server apply its gradient, at the same time, and return their answers; see `call`."""
        calls: list[Future[Any]] = []
        for place, gradient in enumerate(gradients):
            if self.mirror_of(place) is not None:
                self._unmirrored[place].append(gradient)
            calls.append(self.clients[place].futures.apply_gradient(gradient, want_whole))
        found = []
        for place, (call, gradient) in enumerate(zip(calls, gradients, strict=True)):
            applied: Applied | None = None
            with contextlib.suppress(Unavailable):
                applied = call.result()
            if applied is None:
                applied = self._apply_again(place, gradient)
            self._unmirrored[place] = [
                one
                for one in self._unmirrored[place]
                if one.optimizer != gradient.optimizer or one.number >= applied.mirrored
            ]
            found.append(applied)
        return found

    def _apply_again(self, place: int, gradient: Gradient) -> Applied:
        return self.call(place, lambda store: store.apply_gradient(gradient, True))

    def bring_back(self, place: int) -> None:
        """Give a server that was started again its state, and the gradients since its copy.

        Raises:
            DataParallelError: there is no copy.
            Unavailable: a server is gone.
        """
        store = cast(Any, self._stores[place])
        if not store.has_begun():
            mirror = self.mirror_of(place)
            data = None if mirror is None else cast(Any, mirror.server).mirror_of(place)
            if data is None:
                raise self._lost(place)
            store.restore(data, mirror)
            cast(Any, self._stores[place - 1]).mirror_again()
        for gradient in self._unmirrored[place]:
            if store.apply_gradient(gradient, True) is None:
                raise self._lost(place)

    def _lost(self, place: int) -> DataParallelError:
        return DataParallelError(
            f"server {place} of {self.count} was started again and its state is lost, because the server that keeps "
            f"its copy ended, too (found by {self.node.name}): go on from a checkpoint with --resume"
        )


class AsyncParameters:
    """A worker's view of an optimizer's parameters that servers hold.

    number: of the optimizer, the same on all workers.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, number: int, workers: ReplicaWorkers, servers: ParameterServers
    ) -> None:
        """Raises:
        NotSupported: a parameter has gaps in its memory.
        """
        self._optimizer = optimizer
        self._number, self._rank = number, workers.membership.rank
        self._servers = servers
        self._node = workers.node
        self.gradients = 0  # made so far
        self._versions = [0] * servers.count
        self._compression = workers.options.compression
        self._feedback = ErrorFeedback(self._compression) if self._compression is not None else None
        self.wants_whole = True  # parameters, because these are not what servers told last
        self._parameters = parameters_of(optimizer)
        if not all(is_dense(parameter) for parameter in self._parameters):
            raise NotSupported("mode='async': a parameter is a view with gaps in its memory")
        self._shards = [
            [_shard(parameter, place, servers.count) for parameter in self._parameters]
            for place in range(servers.count)
        ]

    def begin(self, applied: Mapping[int, int], last_steps: Mapping[int, int]) -> None:
        """Give the servers the optimizer, unless they have it; it has no state here from then on.

        applied: the number of applied gradients, and last_steps: the step of the last one, by rank.
        """
        for place, shards in enumerate(self._shards):
            server: Any = self._servers.clients[place]
            optimizer = self._optimizer_over(shards, place)
            mirror = self._servers.mirror_of(place)
            server.begin(self._number, optimizer, applied, last_steps, self._compression, mirror)
        self._optimizer.state.clear()

    def apply_gradients(self, step: int) -> None:
        """Send the gradients, wait until they are applied, and take the newest parameters."""
        options = [_servers_options(group) for group in self._optimizer.param_groups]
        whole = [_in_order_of(parameter) for parameter in self._parameters]
        sent = [
            Gradient(self._number, self._rank, self.gradients, step, options, self._forms(whole, place))
            for place in range(self._servers.count)
        ]
        self.gradients += 1
        applied = self._servers.apply(sent, want_whole=self.wants_whole)
        others = [max(0, one.version - 1 - own) for one, own in zip(applied, self._versions, strict=True)]
        self._node.services.log_metrics({"staleness": sum(others) / len(others)}, step)
        self._take(applied)

    def take_newest(self) -> None:
        """Take the newest parameters."""
        self._take(self._servers.call_all(lambda store: store.newest_parameters(self._number, self._rank)))

    def take_cut(self, cuts: Sequence[StoreCut]) -> None:
        """Take the parameters and the optimizer's state of a moment, until `drop_state`."""
        with torch.no_grad():
            for own, cut in zip(self._shards, cuts, strict=True):
                for shard, values in zip(own, cut.parameters[self._number], strict=True):
                    shard.copy_(values)
        count, self.wants_whole = self._servers.count, True
        for index, parameter in enumerate(self._parameters):
            parts = []
            for place, cut in enumerate(cuts):
                if state := cut.states[self._number][index]:
                    parts.append(OwnShardState(*_range(parameter, place, count), state))
            if parts:
                self._optimizer.state[parameter] = joined(parameter, parts)

    def drop_state(self) -> None:
        """Forget the optimizer's state, which the servers have."""
        self._optimizer.state.clear()

    def _forms(self, whole: Sequence[Tensor | None], place: int) -> list[list[Tensor] | None]:
        found: list[list[Tensor] | None] = []
        for index, gradient in enumerate(whole):
            if gradient is None:
                found.append(None)
                continue
            shard = _shard(gradient, place, self._servers.count)
            if self._feedback is not None:
                found.append(self._feedback.encode((place, index), shard.clone()))
            else:  # what is kept must not change when the next step uses the gradient's memory again
                found.append([shard.clone() if self._servers.mirror_of(place) is not None else shard])
        return found

    @torch.no_grad()
    def _take(self, applied: Sequence[Applied]) -> None:
        for own, found in zip(self._shards, applied, strict=True):
            for shard, form in zip(own, found.forms, strict=True):
                if found.is_whole:
                    shard.copy_(form[0])
                else:
                    assert self._compression is not None
                    shard.add_(self._compression.decode(form, shard.numel()).to(shard))
        self._versions = [found.version for found in applied]
        self.wants_whole = False

    def _optimizer_over(self, shards: Sequence[Tensor], place: int) -> torch.optim.Optimizer:
        """Return a copy of the optimizer that updates the host's copies of these shards, in place of its parameters."""
        found = copy.copy(self._optimizer)
        found.defaults = on_host(found.defaults)
        copies = [nn.Parameter(shard.to("cpu", copy=True)) for shard in shards]
        rest = iter(copies)
        found.param_groups = [
            {**_servers_options(group), "params": [next(rest) for _ in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        found.state = defaultdict(dict)
        for own, parameter in zip(copies, self._parameters, strict=True):
            if state := self._optimizer.state.get(parameter):
                cut = {name: self._cut(parameter, name, value, place) for name, value in state.items()}
                found.state[own] = on_host(cut)
        return found

    def _cut(self, parameter: nn.Parameter, name: str, value: Any, place: int) -> Any:
        """Return a server's part of a value of the optimizer's state."""
        if name == "step" or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return copy.deepcopy(value)
        in_order = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        return _shard(in_order, place, self._servers.count).clone()


class AsyncTraining:
    """A worker's part in asynchronous training: where it begins, its gradients, and its end."""

    def __init__(self, workers: ReplicaWorkers, state: TrainingState) -> None:
        self._workers = workers
        self._state = state
        self._servers = ParameterServers(workers)
        self._parameters: dict[ReplicaOptimizer, AsyncParameters] = {}
        self._saved = SavedWorkers(workers.options.replicas)
        self._first_steps: dict[int, int] = {}  # by replica, of whose gradients servers already have some
        self._restored_step = -1
        self._has_begun = False
        self._notes_steps = False
        self._notes: list[Future[Any]] = []
        state.extra_parts = {"asynchronous workers": self._saved}

    def begin(self, *, saves: bool) -> None:
        """Begin the loop with the servers' parameters: those of rank 0 or of a checkpoint; or go on in it.

        saves: whether `save` will be called.
        """
        self._notes_steps = saves or self._workers.options.may_change
        rank = self._workers.membership.rank
        optimizers = self._state.optimizers
        for number, optimizer in enumerate(optimizers):
            self._parameters[optimizer] = AsyncParameters(optimizer.inner, number, self._workers, self._servers)
        self._open_servers(is_first=rank == 0)
        progress = min(
            self._servers.call_all(lambda store: store.progress_of(rank)), key=lambda progress: progress.step
        )
        self._state.step, self._first_steps = progress.step, progress.first_steps or {}
        self._state.load_beside_parameters(progress.state)
        for optimizer, gradients in zip(optimizers, progress.gradients, strict=True):
            self._parameters[optimizer].gradients = gradients
            self._parameters[optimizer].take_newest()
            optimizer.inner.state.clear()
        self._state.is_trained = self._has_begun = True

    def makes_gradient_of(self, replica: int) -> bool:
        """Return whether the servers have not had a replica's gradient of this step before the training was resumed."""
        return self._state.step >= self._first_steps.get(replica, 0)

    def apply_gradients(self, optimizer: ReplicaOptimizer, step: int) -> None:
        """Let the servers apply this worker's gradients, and take the newest parameters."""
        self._of(optimizer).apply_gradients(step)

    def note_step(self) -> None:
        """Tell the servers that this worker has finished a step, for its successor and for checkpoints."""
        if not self._notes_steps:
            return
        for call in self._notes:
            with contextlib.suppress(Unavailable):  # an older note does as well: gradients are not applied twice
                call.result()
        progress = self._progress()
        rank = self._workers.membership.rank
        self._notes = [client.futures.note_progress(rank, progress) for client in self._servers.clients]

    def save(self) -> None:
        """Save a checkpoint of what all servers have applied at one moment; for rank 0.

        Where rank 0 has steps of slower workers to make up for, there is a newer one until it has.
        """
        if self._state.step <= self._restored_step:
            return
        cuts = self._cut()
        optimizers = list(self._parameters)
        try:
            for optimizer in optimizers:
                self._parameters[optimizer].take_cut(cuts)
            applied = [dict(cuts[0].applied[number]) for number in range(len(optimizers))]
            last_steps = [dict(cuts[0].last_steps[number]) for number in range(len(optimizers))]
            places: dict[int, WorkerProgress] = {}
            for cut in cuts:
                for rank, progress in cut.progress.items():
                    if rank not in places or progress.step > places[rank].step:
                        places[rank] = progress
            self._saved.applied, self._saved.last_steps, self._saved.places = applied, last_steps, places
            self._state.save()
        finally:
            for optimizer in optimizers:
                self._parameters[optimizer].drop_state()

    def end(self) -> None:
        """Wait until all workers have made all steps, and take the final parameters."""
        rank, workers = self._workers.membership.rank, self._workers.membership.world_size
        if self._has_begun:
            step = self._state.step
            self._servers.call_all(lambda store: store.note_finished(rank, step))
            if not all(self._servers.call_all(lambda store: store.wait_until_finished(step, workers))):
                raise Unavailable(f"{self._workers.node.name}: the program stops before all workers have finished")
        for parameters in self._parameters.values():
            parameters.take_newest()

    def leave(self) -> None:
        """Tell the servers that `train` has returned; they end once it has on all workers."""
        rank, workers = self._workers.membership.rank, self._workers.membership.world_size
        for place in range(self._servers.count):
            try:
                if self._has_begun:
                    self._servers.call(place, lambda store: store.progress_of(rank))  # brings it back if need be
                self._servers.call(place, lambda store: store.leave(rank, workers))
            except TrainingHasEnded:  # a server ends only once all workers have left, so this one may end, too
                with contextlib.suppress(Unavailable):
                    cast(Any, self._servers.clients[place]).finish()

    def _of(self, optimizer: ReplicaOptimizer) -> AsyncParameters:
        found = self._parameters.get(optimizer)
        if found is None:
            number = self._state.optimizers.index(optimizer)
            found = AsyncParameters(optimizer.inner, number, self._workers, self._servers)
            found.begin({}, {})
            self._parameters[optimizer] = found
        return found

    def _progress(self) -> WorkerProgress:
        gradients = tuple(self._of(optimizer).gradients for optimizer in self._state.optimizers)
        state = on_host(self._state.beside_parameters())
        return WorkerProgress(self._state.step, gradients, state, self._first_steps or None)

    def _open_servers(self, *, is_first: bool) -> None:
        """Return once all servers let workers train. is_first: this worker gives them what they begin with.

        Raises:
            TrainingHasEnded: a server has ended, because all workers have.
            Unavailable: the program stops.
        """
        clients: list[Any] = self._servers.clients
        failures = 0
        while True:
            try:
                closed = [client for client in clients if not client.is_open()]
                if not closed:
                    break
                if len(closed) < len(clients):
                    for place, client in enumerate(clients):
                        if not client.has_begun():
                            self._servers.bring_back(place)
                if not is_first:
                    closed[0].wait_until_open()
                elif not all(client.is_open() for client in clients):
                    self._give_servers_their_state()
                failures = 0
            except Unavailable as error:
                failures += 1
                if stop_event().wait(_PAUSE_S):
                    raise
                if failures == _TRIES:
                    raise TrainingHasEnded(f"{self._workers.node.name} cannot reach the servers: {error}") from error
            if stop_event().is_set():
                raise Unavailable(f"{self._workers.node.name}: the program stops before its first step")
        if is_first:
            self._resume_servers()  # this worker's predecessor may have died while it saved

    def _give_servers_their_state(self) -> None:
        """Give the servers the parameters of a checkpoint or of this worker, and tell them where workers begin."""
        workers, saved, count = self._workers.membership.world_size, self._saved, len(self._state.optimizers)
        self._state.restore()
        none_applied: list[dict[int, int]] = [{} for _ in range(count)]
        applied, last_steps, places = none_applied, none_applied, saved.places
        if not places:
            beside = on_host(self._state.beside_parameters())
            places = dict.fromkeys(range(workers), WorkerProgress(self._state.step, (0,) * count, beside))
        elif len(saved.applied) != count:
            raise CheckpointError(
                f"the checkpoint is of {len(saved.applied)} optimizers that train asynchronously, and there are {count}"
            )
        elif len(places) != workers:
            places = saved.dealt(workers)
        else:
            applied, last_steps = saved.applied, saved.last_steps or none_applied
        if saved.places:
            self._restored_step = self._state.step
        for parameters, counts, steps in zip(self._parameters.values(), applied, last_steps, strict=True):
            parameters.begin(counts, steps)
        for client in cast(list[Any], self._servers.clients):
            client.open(places)

    def _cut(self) -> list[StoreCut]:
        """Return the states of all servers at a moment at which they have applied the same gradients."""
        while True:
            try:
                paused = self._servers.call_all(lambda store: store.pause())
                limit = {
                    number: {rank: max(one[number].get(rank, 0) for one in paused) for rank in ranks}
                    for number in paused[0]
                    for ranks in [{rank for one in paused for rank in one[number]}]
                }
                calls = [client.futures.cut(limit) for client in self._servers.clients]
                found = [call.result() for call in calls]
                if None not in found:
                    return found
            except Unavailable:  # a server is being started again
                if stop_event().wait(_PAUSE_S):
                    raise
            finally:
                self._resume_servers()

    def _resume_servers(self) -> None:
        for client in cast(list[Any], self._servers.clients):
            with contextlib.suppress(Unavailable):  # it is being started again, and goes on anyway
                client.resume()


class SavedWorkers:
    """The workers' places in their loops, as a part of checkpoints.

    applied: by optimizer, the number of each rank's gradients that the parameters contain. last_steps: by optimizer,
    the step of each rank's last one; empty in checkpoints of lp_pipe before 26 November 2026.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self.applied: list[dict[int, int]] = []
        self.last_steps: list[dict[int, int]] = []
        self.places: dict[int, WorkerProgress] = {}

    def state_dict(self) -> dict[str, Any]:
        places = {rank: tuple(place) for rank, place in self.places.items()}
        return {"applied": self.applied, "last_steps": self.last_steps, "places": places}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.applied, self.last_steps = state["applied"], state.get("last_steps", [])
        self.places = {rank: WorkerProgress(*place) for rank, place in state["places"].items()}

    def dealt(self, workers: int) -> dict[int, WorkerProgress]:
        """Return the places of another number of workers, by rank.

        Each goes on where the slowest of the workers was whose replicas it hosts, and leaves out what others have made.

        Raises:
            CheckpointError: the checkpoint is of a moment inside a step, of which it has a part.
        """
        hosts: dict[int, WorkerProgress] = {}
        first_steps: dict[int, int] = {}
        for rank, place in self.places.items():
            first = self._first_step(rank, place)
            for replica in hosted_replicas(rank, len(self.places), self._replicas):
                hosts[replica] = place
                first_steps[replica] = max(first, (place.first_steps or {}).get(replica, 0))
        found = {}
        for rank in range(workers):
            own = hosted_replicas(rank, workers, self._replicas)
            slowest = min((hosts[replica] for replica in own), key=lambda place: place.step)
            no_gradients = (0,) * len(self.applied)
            found[rank] = slowest._replace(
                gradients=no_gradients, first_steps={replica: first_steps[replica] for replica in own}
            )
        return found

    def _first_step(self, rank: int, place: WorkerProgress) -> int:
        """Return the first step of a worker whose gradient the parameters do not contain."""
        ahead = [counts.get(rank, 0) - made for counts, made in zip(self.applied, place.gradients, strict=True)]
        if not any(ahead):
            return place.step
        after = self.last_steps[0][rank] + 1 if self.last_steps else -1
        if len(ahead) > 1 or after - place.step != ahead[0]:
            raise CheckpointError(
                f"the checkpoint has a part of step {place.step} of the asynchronous worker of rank {rank}, so only "
                f"that one can go on with it: resume with workers={len(self.places)}"
            )
        return after


def _servers_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options of an optimizer's group, for an update on the host."""
    found: dict[str, Any] = on_host(options_of(group))
    return {**found, "capturable": False} if "capturable" in found else found  # torch refuses it there


def _in_order_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the parameter's gradient on the host, with its elements in memory as those of the parameter."""
    gradient = parameter.grad
    if gradient is None or gradient.stride() == parameter.stride():
        return None if gradient is None else gradient.cpu()
    return torch.empty_like(parameter, device="cpu").copy_(gradient)


def _range(tensor: Tensor, place: int, count: int) -> tuple[int, int]:
    """Return where a server's part of a tensor begins and ends."""
    numel = tensor.numel()
    return numel * place // count, numel * (place + 1) // count


def _shard(tensor: Tensor, place: int, count: int) -> Tensor:
    """Return a server's part of a dense tensor, as it lies in memory."""
    begin, end = _range(tensor, place, count)
    return flat(tensor)[begin:end]
