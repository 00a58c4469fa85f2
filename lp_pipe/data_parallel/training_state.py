"""The models and optimizers that a worker trains, and what else the loop over steps keeps: checkpoints, undoing."""

import contextlib
import copy
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lp_pipe.checkpoint import Checkpoints
from lp_pipe.checkpoint.parts import Stateful
from lp_pipe.collectives.backend import Call, GenerationOver
from lp_pipe.data_parallel.exchange import share_initial_values
from lp_pipe.data_parallel.optimizer import ReplicaOptimizer
from lp_pipe.data_parallel.shards import ReplicaBuffers
from lp_pipe.data_parallel.trained_model import SavedBeside, TrainedModel
from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.errors import CheckpointError, DataParallelError
from lp_pipe.training.rng import generators_locked

if TYPE_CHECKING:  # torch's FSDP2 takes a second to import
    from lp_pipe.data_parallel.sharded_model import ShardedModel

_log = logging.getLogger(__name__)
_BUFFERS = Call("buffers of replica 0")


class TrainingState:
    """What one worker trains. Used by the thread that runs `train`.

    step: the number of the current step, or of the next one. is_trained: whether the worker has trained, or has the
    state of one that has. flags: what workers tell each other with a step's sums.
    """

    def __init__(self, workers: ReplicaWorkers, flags: Callable[[], list[float]]) -> None:
        self._workers = workers
        self._flags = flags
        self.step = 0
        self.is_trained = False
        self.optimizers: list[ReplicaOptimizer] = []
        self.buffers = ReplicaBuffers([])
        self._parts: dict[str, Any] = {}  # objects with state_dict() and load_state_dict(), by name
        self.extra_parts: dict[str, Stateful] = {}  # of checkpoints only
        self._trained: dict[str, TrainedModel] = {}  # as which checkpoints keep some of these
        self._checkpoints: Checkpoints | None = None
        self._beside_copies: dict[int, tuple[list[Callable[[], None]], list[Any]]] = {}  # by step: undoes, buffers

    @property
    def models(self) -> list[nn.Module]:
        return list(dict.fromkeys(optimizer.model for optimizer in self.optimizers))

    @property
    def _sharded_models(self) -> "list[ShardedModel]":
        found = [one.sharded_model for one in self.optimizers if one.sharded_model is not None]
        return list(dict.fromkeys(found))

    def add_optimizer(self, optimizer: ReplicaOptimizer) -> None:
        self.optimizers.append(optimizer)
        self.buffers = ReplicaBuffers(list(dict.fromkeys(module for one in self.models for module in one.modules())))

    def set_parts(self, parts: Mapping[str, Any]) -> None:
        """Set what checkpoints keep and joiners get; models and optimizers that are not in it are added.

        Raises:
            DataParallelError: a part has no state.
        """
        for name, part in parts.items():
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise DataParallelError(f"steps({name}=…): {part!r} has no state_dict() and load_state_dict()")
        wrapped = {id(optimizer.inner): optimizer for optimizer in self.optimizers}
        self._parts = {name: wrapped.get(id(part), part) for name, part in parts.items()}
        self._checkpoints = None
        given = {id(part) for part in self._parts.values()}
        for number, optimizer in enumerate(self.optimizers):  # training cannot go on without these
            for name, part in (("model", optimizer.model), ("optimizer", optimizer)):
                if id(part) not in given:
                    given.add(id(part))
                    self._parts[f"{name} of optimizer {number}"] = part
        self._trained = self._trained_models()

    def _trained_models(self) -> dict[str, TrainedModel]:
        schedulers = [part for part in self._parts.values() if isinstance(part, torch.optim.lr_scheduler.LRScheduler)]
        found = {}
        for name, part in self._parts.items():
            own = [one for one in self.optimizers if one.model is part]
            steps = {id(inner) for one in own for inner in (one, one.inner)}
            of_own = [scheduler for scheduler in schedulers if id(scheduler.optimizer) in steps]
            if own:
                found[name] = TrainedModel(part, own, of_own, self._workers, lambda: self.step, self._flags)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of all that `steps` was given; where it is sharded, in the body of `whole`."""
        return {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def beside_parameters(self) -> dict[str, Any]:
        """Return a copy of the state without parameters and their optimizers' state."""
        options = [[options_of(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        return {"parts": self._other_parts(), "options": options, "buffers": self.buffers.values()}

    def load_beside_parameters(self, state: Mapping[str, Any]) -> None:
        """Take a state that `beside_parameters` gave."""
        for name, part in state["parts"].items():
            self._parts[name].load_state_dict(part)
        for optimizer, groups in zip(self.optimizers, state["options"], strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update({name: _on_device_of(group.get(name), value) for name, value in options.items()})
        own = self.buffers.tensors()
        self.buffers.put([_on_device_of(*pair) for pair in zip(own, state["buffers"], strict=True)])

    def _other_parts(self) -> dict[str, Any]:
        """Return copies of the states of all parts but models and their optimizers, by name."""
        trained = {id(part) for one in self.optimizers for part in (one, one.model)}
        return {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items() if id(part) not in trained}

    # ---- the same on all workers ----

    def copy_model(self, optimizer: ReplicaOptimizer) -> None:
        """Give an optimizer's model the parameters and buffers of rank 0's; all workers call this.

        Raises:
            DataParallelError: the workers' models differ.
        """
        self._check_same([optimizer])
        if optimizer.sharded_model is not None:
            return  # it was made the same when it was sharded
        rank, model = self._workers.membership.rank, optimizer.model
        state = model.state_dict(keep_vars=True)
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        share_initial_values(self._workers.backend, {id(one): one for one in state.values() if id(one) in own}.values())
        rest = {name: value for name, value in state.items() if id(value) not in own}  # extra state, or made by hooks
        sent = self._workers.broadcast(rest if rank == 0 else None, 0)
        if rank and sent:
            model.load_state_dict(sent, strict=False)

    def copy_state(self, root: int) -> None:
        """Give the step and the state of rank `root` to the workers that are not trained; all workers call this.

        Raises:
            DataParallelError: the workers' models differ.
        """
        rank = self._workers.membership.rank
        self._check_same(self.optimizers)
        read = [one for one in self._trained.values() if one.is_sharded and one.loaded_from is not None]
        ready = {id(part) for one in read for part in (one.model, *one.optimizers)}  # each worker has read its own
        ready |= {id(one.model) for one in self._sharded_models}  # or had it from rank 0 when it was sharded
        parts = {name: part for name, part in self._parts.items() if id(part) not in ready}
        # The state in shards is dealt; what is left is what all workers have.
        parts = {name: part.inner if _moves_shards(part) else part for name, part in parts.items()}
        whole = [one for one in self.optimizers if id(one) not in ready and not one.moves_shards]
        with self._whole_states(whole, keeps=rank == root):
            own = {name: part.state_dict() for name, part in parts.items()} if rank == root else {}
        sent = self._workers.broadcast((self.step, own) if rank == root else None, root)
        if not self.is_trained and rank != root:
            self.step, state = sent
            for name, part in parts.items():
                part.load_state_dict(state[name])
        for trained in self._trained.values():
            trained.loaded_from = None

    @property
    def has_mirrors(self) -> bool:
        """Whether shards outlive their worker, since another one mirrors them."""
        return any(optimizer.has_mirrors for optimizer in self.optimizers)

    @property
    def moves_shards(self) -> bool:
        """Whether shards are dealt anew when workers change."""
        return any(optimizer.moves_shards for optimizer in self.optimizers)

    @property
    def keeps_copies(self) -> bool:
        """Whether shards outlive their worker in copies, to which all workers go back."""
        return any(optimizer.copies is not None for optimizer in self.optimizers)

    def copied_steps(self) -> set[int]:
        """Return the steps of which this worker has copies."""
        found = [optimizer.copies.steps for optimizer in self.optimizers if optimizer.copies is not None]
        return set(self._beside_copies).intersection(*found) if found else set()

    def keep_beside_copies(self) -> None:
        """Keep what lies beside the shards that were copied in this step."""
        whole = [optimizer.undoing() for optimizer in self.optimizers if optimizer.copies is None]
        self._beside_copies[self.step] = [self.undoing(), *whole], self.buffers.values()

    def forget_older_copies(self) -> None:
        """Forget copies of other steps, because all workers have those of this one."""
        self._beside_copies = {self.step: self._beside_copies[self.step]}
        for optimizer in self.optimizers:
            if optimizer.copies is not None:
                optimizer.copies.keep_only(self.step)

    def go_back(self, step: int) -> None:
        """Go back to the copies of a step; shards are to be dealt then."""
        undoes, buffers = self._beside_copies[step]
        for undo in undoes:
            undo()
        self.buffers.put(copy.deepcopy(buffers))
        for optimizer in self.optimizers:
            if optimizer.copies is not None:
                optimizer.go_back(step)
        self.step = step

    def deal_shards(self, step: int, *, has_state: bool) -> bool:
        """Give each worker the shards that it needs now; all workers call this. False: shards are lost.

        step: of the state that is dealt. has_state: whether this worker has trained, or has the state of one that has.

        Raises:
            GenerationOver: a worker is gone.
        """
        exchange = self._workers.exchange
        moving = [optimizer for optimizer in self.optimizers if optimizer.moves_shards]
        return all([optimizer.deal(exchange, self._flags, has_state=has_state, step=step) for optimizer in moving])

    def share_buffers(self, changed: Sequence[bool]) -> None:
        """Give all workers the buffers of replica 0. changed: which of them replica 0 has written to in this step."""
        self.buffers.keep_only(0)
        if self._workers.membership.world_size == 1 or not any(changed):
            return
        tensors = [tensor for tensor, is_changed in zip(self.buffers.tensors(), changed, strict=True) if is_changed]
        packed = torch.cat([_bytes_of(tensor) for tensor in tensors])
        self._workers.backend.broadcast(packed, 0, call=_BUFFERS)
        begin = 0
        for tensor in tensors:
            end = begin + tensor.numel() * tensor.itemsize
            tensor.copy_(packed[begin:end].clone().view(tensor.dtype).view(tensor.shape))
            begin = end

    def _check_same(self, optimizers: list[ReplicaOptimizer]) -> None:
        """Refuse models that differ between workers, on all of them.

        Raises:
            DataParallelError: names the first parameter that differs.
        """
        own = sorted(self._parts), [optimizer.signature() for optimizer in optimizers]
        first, *others = self._workers.gathered(own)
        for rank, other in enumerate(others, start=1):
            if other[0] != first[0]:
                raise DataParallelError(f"steps() has the state {first[0]} on rank 0 and {other[0]} on rank {rank}")
            for tensors, expected in zip(other[1], first[1], strict=False):
                for found, wanted in zip(tensors, expected, strict=False):
                    if found != wanted:
                        raise DataParallelError(
                            f"the workers' models differ: {_described(wanted)} on rank 0 is {_described(found)} on "
                            f"rank {rank}: build the same model on all workers"
                        )
            if [len(tensors) for tensors in other[1]] != [len(tensors) for tensors in first[1]]:
                raise DataParallelError(
                    f"the workers' models differ: rank 0 has {[*map(len, first[1])]} parameters and buffers, rank "
                    f"{rank} has {[*map(len, other[1])]}"
                )

    # ---- checkpoints, and dropped steps ----

    def save(self) -> None:
        """Save a checkpoint of this step; all workers call this.

        Rank 0 writes it in the background. Where optimizer state is sharded, all workers write what they have, at once.

        Raises:
            CheckpointError: it cannot be written, or the one before could not.
            GenerationOver: a worker is gone, where all write.
        """
        for name, trained in list(self._trained.items()):
            if not (trained.is_sharded or trained.can_hold()):  # only now is it known what the optimizer keeps
                self.wait_until_saved()
                del self._trained[name]
                self._checkpoints = None
        if self._workers.membership.rank == 0:
            try:
                self._all_checkpoints().save(self.step, wait=False)
            except CheckpointError as error:
                if isinstance(error.__cause__, GenerationOver):
                    raise error.__cause__ from None
                raise
            return
        for trained in self._trained.values():
            if trained.is_sharded:
                trained.take_part()

    def restore(self, lost: str = "") -> None:
        """Load the newest checkpoint, if there is one; all workers call this.

        lost: what of the present state is lost, so that there must be one.

        Rank 0 reads it. Where state is sharded the others read their parts; other state they get by `copy_state`.

        Raises:
            DataParallelError: there is none, and there must be one.
        """
        places: dict[str, Path | None] = {}
        if self._workers.membership.rank == 0 and self._parts:
            self.wait_until_saved()
            if (found := self._all_checkpoints().restore()) is not None:
                self.step = found.step
                _log.info("going on from step %d, as %s has it", found.step, found.path)
            places = {name: trained.loaded_from for name, trained in self._trained.items()}
        if any(trained.is_sharded for trained in self._trained.values()):
            places = self._workers.broadcast(places, 0)
            if lost and not any(places.values()):
                raise DataParallelError(lost)
            for name, trained in self._trained.items():
                if (path := places[name]) is not None and path != trained.loaded_from:
                    trained.load(path)

    def wait_until_saved(self) -> None:
        """Wait until all checkpoints are written."""
        if self._checkpoints is not None:
            self._checkpoints.wait_until_written()

    def undoing(self) -> Callable[[], None]:
        """Return a function that brings all back to the present state which only a dropped step may have changed."""
        kept = self._other_parts()
        options = [(group, options_of(group)) for optimizer in self.optimizers for group in optimizer.param_groups]
        with generators_locked():  # a worker in another thread may be in a shard
            generators = torch.get_rng_state(), random.getstate()
            of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

        def undo() -> None:
            for name, state in kept.items():
                self._parts[name].load_state_dict(state)
            for group, values in options:
                group.update(values)
            with generators_locked():
                torch.set_rng_state(generators[0])
                random.setstate(generators[1])
                if of_gpus is not None:
                    torch.cuda.set_rng_state_all(of_gpus)

        return undo

    @property
    def is_sharded(self) -> bool:
        """Whether no worker has all of the state."""
        return any(optimizer.is_sharded for optimizer in self.optimizers)

    @contextlib.contextmanager
    def whole(self, *, keeps: bool) -> Iterator[None]:
        """Let workers take the whole state in the body, which all workers enter. keeps: whether this one does."""
        with self._whole_states(self.optimizers, keeps=keeps), contextlib.ExitStack() as models:
            for model in self._sharded_models:
                models.enter_context(model.whole_state(keeps=keeps))
            yield

    @contextlib.contextmanager
    def _whole_states(self, optimizers: Sequence[ReplicaOptimizer], *, keeps: bool) -> Iterator[None]:
        with contextlib.ExitStack() as whole:
            for optimizer in optimizers:
                whole.enter_context(optimizer.whole_state(keeps=keeps))
            yield

    def _all_checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            models = {id(trained.model): name for name, trained in self._trained.items()}
            beside = {
                name: SavedBeside(part, models[id(part.model)])
                for name, part in self._parts.items()
                if isinstance(part, ReplicaOptimizer) and id(part.model) in models
            }
            self._checkpoints = Checkpoints({**self._parts, **self._trained, **beside, **self.extra_parts})
        return self._checkpoints


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options of an optimizer's group."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _on_device_of(own: Any, value: Any) -> Any:
    """Return a value that was sent, on the device of the one here that it replaces."""
    return value.to(own.device) if isinstance(own, Tensor) and isinstance(value, Tensor) else value


def _moves_shards(part: Any) -> bool:
    return isinstance(part, ReplicaOptimizer) and part.moves_shards


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _described(tensor: tuple[str, list[int], str]) -> str:
    name, shape, dtype = tensor
    return f"{name} ({dtype.removeprefix('torch.')} {shape})"
