"""A worker's part in the steps of all workers: commits, dropped steps, state for joiners, checkpoints.

A step is committed when `agree` returns True: then every worker holds the whole sum. When a worker is gone the others
meet again and tell each other how far they are; what one has committed, all can finish:

    A   sums   agree: True   step 8 …          meet: 8 are committed                drops step 8, which comes again
    B   sums   agree: GenerationOver           meet: 7 are committed, has the sum   finishes step 7
    C   sums   agree: killed
"""

import contextlib
import copy
import enum
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lp_pipe.checkpoint import Checkpoints
from lp_pipe.collectives.backend import Call, GenerationOver
from lp_pipe.collectives.group import Group
from lp_pipe.context import stop_event
from lp_pipe.data_parallel.optimizer import ReplicaOptimizer
from lp_pipe.data_parallel.shards import ReplicaBuffers
from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.errors import DataParallelError, NotSupported, Unavailable
from lp_pipe.training.rng import generators_locked, step_rng

T = TypeVar("T")
_log = logging.getLogger(__name__)
_OPTIMIZER_PLACE = -1  # the number that stands for a replica in `step_rng` while an optimizer draws
_BUFFERS = Call("buffers of replica 0")


@dataclass(frozen=True)
class Position:
    """How far a worker is, as it tells the others when they meet.

    committed: the number of committed steps. holds_sum: whether it holds the whole sum of the next one.
    has_state: whether it has trained, or has the state of a worker that has.
    """

    node: str
    committed: int
    holds_sum: bool
    has_state: bool


class StepPhase(enum.Enum):
    """How far the current step is."""

    OPEN = enum.auto()
    COMMITTED = enum.auto()
    DROPPED = enum.auto()


@dataclass
class _CurrentStep:
    """The step that is in progress. is_over: this generation's members change. has_met: the next one has met."""

    undo: Callable[[], None]
    phase: StepPhase = StepPhase.OPEN
    is_over: bool = False
    has_met: bool = False
    stepped: list[ReplicaOptimizer] = field(default_factory=list)
    shards_calls: int = 0
    microbatches: dict[int, int] = field(default_factory=dict)  # by replica
    fires_at_call: int | None = None  # gradients since the last shard began, when the user called a collective
    changed: list[bool] = field(default_factory=list)  # buffers that replica 0 has written to

    @property
    def has_values(self) -> bool:
        """Whether collectives of the user's code return values with a meaning."""
        return not (self.is_over or self.has_met)


class ReplicaSteps:
    """The steps of one worker. Used by the thread that runs `train`, except for `ask`."""

    def __init__(self, workers: ReplicaWorkers) -> None:
        self.workers = workers
        self._options = workers.options
        self.step = 0  # the number of the current step, or of the next one
        self._now: _CurrentStep | None = None
        self._has_state = False
        self._is_in_steps = False
        self._awaits_joiners = False
        self._state: dict[str, Any] = {}
        self._optimizers: list[ReplicaOptimizer] = []
        self._buffers = ReplicaBuffers([])
        self._usual_shards_calls: int | None = None
        self._overlaps = False  # whether sums may begin before the optimizer's step
        self._checkpoints: Checkpoints | None = None
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._answering = threading.Lock()
        self._answers_at_once = False

    # ---- the loop over steps ----

    def run(self, count: int, save_every: int | None, state: Mapping[str, Any]) -> Iterator[int]:
        """Yield the numbers of the steps that are still to be done; see `Replica.steps`."""
        self._begin_loop(state)
        self._is_in_steps = True
        try:
            while self.step < count:
                if stop_event().is_set():  # not the end of the loop: what follows it may save a trained model
                    raise Unavailable(f"{self.workers.node.name}: the program stops before step {self.step}")
                self._answer_requests()
                self._open()
                before = self.step
                yield self.step
                self._close()
                if save_every and self.step > before and self.step % save_every == 0:
                    self._save()
            if self._checkpoints is not None:
                self._checkpoints.wait_until_written()
        finally:
            self._is_in_steps = False

    def add_optimizer(self, optimizer: ReplicaOptimizer) -> None:
        """Take in an optimizer; parameters and buffers become rank 0's, at the latest when `steps` begins.

        Raises:
            DataParallelError: the workers' models differ.
        """
        self._optimizers.append(optimizer)
        modules = dict.fromkeys(module for one in self._optimizers for module in one.model.modules())
        self._buffers = ReplicaBuffers(list(modules))
        if self._now is not None:  # made inside a step
            optimizer.begin_step(self.workers.exchange, self._flags)
        if not self._options.may_change:
            self._check_same([optimizer])
            model = optimizer.model.state_dict()
            sent = self.workers.broadcast(model if self.workers.membership.rank == 0 else None, 0)
            if self.workers.membership.rank:
                optimizer.model.load_state_dict(sent)

    def begin_shards(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Note that the shards of a batch begin; return the number of the first micro-batch, by replica.

        counts: the number of micro-batches, by replica.
        """
        now = self._open()
        now.shards_calls += 1
        if now.shards_calls == 1:
            for optimizer in self._optimizers:
                optimizer.follow_freezing()
        first = dict(now.microbatches)
        for replica, count in counts.items():
            now.microbatches[replica] = first.get(replica, 0) + count
        return first

    @property
    def has_values(self) -> bool:
        """Whether this step will not be dropped, as far as is known."""
        return self._now is None or self._now.has_values

    def select(self, replica: int) -> None:
        """Let the next backwards belong to a replica."""
        self._open().fires_at_call = None
        self._buffers.select(replica)
        for optimizer in self._optimizers:
            optimizer.buckets.select(replica - self.workers.replicas.start)

    def open_window(self) -> None:
        """Note that this worker's last shard of the batch begins, if it has one."""
        is_usual = self._open().shards_calls == self._usual_shards_calls and len(self._optimizers) == 1
        for optimizer in self._optimizers:
            optimizer.buckets.open_window(sends_early=self._overlaps and is_usual)

    def close_window(self) -> None:
        """Note that this worker's last shard of the batch has ended."""
        for optimizer in self._optimizers:
            optimizer.buckets.close_window()

    def group_for_call(self) -> Group | None:
        """Return the group for a collective of all workers, after the sum of gradients that may be summed already.

        None, and Raises: as `group_beside_sums`.
        """
        group = self.group_beside_sums()
        if group is not None:
            for optimizer in self._optimizers:
                optimizer.drain()
            if self._now is not None:
                self._now.fires_at_call = self._fires
        return group

    def group_beside_sums(self) -> Group | None:
        """Return the group for a collective of the user's code; None: its result has no meaning in this step.

        Raises:
            RuntimeError: workers may change, and `steps` has not begun.
        """
        if self._options.may_change and not self._has_state:
            raise RuntimeError(
                f"a collective before replica.steps(): with on_failure={self._options.on_failure!r} a worker may join "
                "later, and would not take part in it: use collectives inside the loop over steps"
            )
        return self.workers.group if self.has_values else None

    def generation_is_over(self, error: GenerationOver) -> None:
        """Note that an operation has failed because the members change; raise the error if they may not."""
        if not self._options.may_change or self._now is None:
            raise error
        self._now.is_over = True

    def optimizer_step(self, optimizer: ReplicaOptimizer) -> bool:
        """Sum what is left, commit if it is the step's last optimizer, and update; False: the step is dropped."""
        now = self._open()
        if not now.shards_calls:
            optimizer.follow_freezing()
            if self.workers.membership.world_size != self._options.replicas:
                raise DataParallelError(
                    f"optimizer.step() without replica.shards() needs {self._options.replicas} workers, one for each "
                    f"replica, and there are {self.workers.membership.world_size}"
                )
        is_last = len({*now.stepped, optimizer}) == len(self._optimizers)
        may_finish = False
        if now.has_values:
            with self._over_noted():
                optimizer.buckets.finish()
                self._note_flags(now, optimizer)
                if is_last:
                    self._share_buffers(now)
                    may_finish = True
                    self._agree()
        if now.is_over and not now.has_met:
            self._meet_again(now, may_finish=may_finish)
        if now.phase is StepPhase.DROPPED:
            optimizer.clear_gradients()
            return False
        with step_rng(self._options.seed, _OPTIMIZER_PLACE, self.step, len(now.stepped)):
            optimizer.apply(keeps_undo=self._options.may_change and not is_last)
        optimizer.exchange_updates()  # not before: workers in other threads wait for the random numbers
        now.stepped.append(optimizer)
        if is_last:
            now.phase = StepPhase.COMMITTED
            if not self._is_in_steps:
                self._close()
        return True

    def _begin_loop(self, state: Mapping[str, Any]) -> None:
        for name, part in state.items():
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise DataParallelError(f"steps({name}=…): {part!r} has no state_dict() and load_state_dict()")
        self._close()
        wrapped = {id(optimizer.inner): optimizer for optimizer in self._optimizers}
        self._state = {name: wrapped.get(id(part), part) for name, part in state.items()}
        self._checkpoints = None
        given = {id(part) for part in self._state.values()}
        for number, optimizer in enumerate(self._optimizers):  # training cannot go on without these
            for name, part in (("model", optimizer.model), ("optimizer", optimizer)):
                if id(part) not in given:
                    self._state[f"{name} of optimizer {number}"] = part
        if not self._has_state:
            self._synchronize(self._positions(is_first=True))

    def _open(self) -> _CurrentStep:
        if self._now is None:
            self._buffers.begin_step()
            for optimizer in self._optimizers:
                optimizer.begin_step(self.workers.exchange, self._flags)
            may_drop = self._options.may_change and self._is_in_steps
            self._now = _CurrentStep(self._undoing() if may_drop else lambda: None)
            self._now.changed = [False] * self._buffers.count
        return self._now

    def _close(self) -> None:
        """End the current step, if there is one: commit it if that is still to be done, or go back to its beginning."""
        now = self._now
        if now is None:
            return
        if now.phase is StepPhase.OPEN and now.has_values:
            with self._over_noted():
                self._agree()
                now.phase = StepPhase.COMMITTED
        if now.is_over and not now.has_met and self._meet_again(now, may_finish=False):
            now.phase = StepPhase.COMMITTED
        self._now = None
        if now.phase is StepPhase.DROPPED:
            self._buffers.restore()
            for optimizer in now.stepped:
                optimizer.undo()
            now.undo()
        else:
            self.step += 1
            self._usual_shards_calls = now.shards_calls
        if now.has_met:
            self._overlaps = False
            self._synchronize(self._met)

    # ---- sums and commits ----

    def _flags(self) -> list[float]:
        """Return what all workers must know of this one: whether gradients came after a collective, and its buffers."""
        now = self._now
        is_late = now is not None and now.fires_at_call is not None and self._fires > now.fires_at_call
        hosts_first = self.workers.replicas.start == 0
        changed = self._buffers.changed_by(0) if hosts_first else [False] * self._buffers.count
        return [float(is_late), *map(float, changed)]

    @property
    def _fires(self) -> int:
        return sum(optimizer.buckets.fires_in_window for optimizer in self._optimizers)

    def _note_flags(self, now: _CurrentStep, optimizer: ReplicaOptimizer) -> None:
        is_late, *changed = optimizer.buckets.extra_flags
        now.changed = [bool(flag) for flag in changed]
        self._overlaps = not is_late
        optimizer.buckets.learn()

    def _share_buffers(self, now: _CurrentStep) -> None:
        """Give all workers the buffers of replica 0."""
        self._buffers.keep_only(0)
        if self.workers.membership.world_size == 1 or not any(now.changed):
            return
        tensors = [
            tensor for tensor, is_changed in zip(self._buffers.tensors(), now.changed, strict=True) if is_changed
        ]
        packed = torch.cat([_bytes_of(tensor) for tensor in tensors])
        self.workers.backend.broadcast(packed, 0, call=_BUFFERS)
        begin = 0
        for tensor in tensors:
            end = begin + tensor.numel() * tensor.itemsize
            tensor.copy_(packed[begin:end].clone().view(tensor.dtype).view(tensor.shape))
            begin = end

    def _agree(self) -> None:
        if not self.workers.backend.agree(self.step):
            raise DataParallelError(
                f"the workers of group {self._options.group!r} are at different steps; {self.workers.node.name} is at "
                f"{self.step}: all must make the same steps"
            )

    @contextlib.contextmanager
    def _over_noted(self) -> Iterator[None]:
        try:
            yield
        except GenerationOver as error:
            self.generation_is_over(error)

    # ---- other workers ----

    def _meet_again(self, now: _CurrentStep, *, may_finish: bool) -> bool:
        """Meet the workers that are left or new, and return whether this step is finished; else it is dropped."""
        position = self._position(now, holds_sum=may_finish)
        self._met = self._positions(position)
        now.has_met = True
        if now.phase is not StepPhase.OPEN:
            return True
        trained = [one for one in self._met if one.has_state]
        is_elsewhere = any(one.committed > self.step for one in trained)
        is_held = all(one.holds_sum or one.committed > self.step for one in trained)
        if may_finish and (is_elsewhere or is_held):
            return True
        now.phase = StepPhase.DROPPED
        return False

    def _position(self, now: _CurrentStep | None = None, *, holds_sum: bool = False) -> Position:
        is_committed = now is not None and now.phase is StepPhase.COMMITTED
        return Position(self.workers.node.name, self.step + is_committed, holds_sum, self._has_state)

    def _positions(self, own: Position | None = None, *, is_first: bool = False) -> list[Position]:
        """Meet, as often as it takes, and return how far all workers are."""
        while True:
            try:
                if not is_first:
                    self.workers.meet()
                return self.workers.gathered(own or self._position())
            except GenerationOver:
                if not self._options.may_change:
                    raise
                is_first = False

    def _synchronize(self, positions: list[Position]) -> None:
        """Give the state of a worker that has trained to those that have not; at first rank 0's to all."""
        while True:
            try:
                if any(not position.has_state for position in positions):
                    self._send_state(positions)
                self._has_state = True
                return
            except GenerationOver:
                if not self._options.may_change:
                    raise
                positions = self._positions()

    def _send_state(self, positions: list[Position]) -> None:
        rank = self.workers.membership.rank
        root = next((rank for rank, position in enumerate(positions) if position.has_state), None)
        if root is None:
            root = 0
            if rank == root:
                self._restore()
        self._check_same(self._optimizers)
        own = {name: _own_state(part) for name, part in self._state.items()} if rank == root else {}
        sent = self.workers.broadcast((self.step, own) if rank == root else None, root)
        if not self._has_state and rank != root:
            self.step, state = sent
            for name, part in self._state.items():
                part.load_state_dict(state[name])

    def _check_same(self, optimizers: list[ReplicaOptimizer]) -> None:
        """Refuse models that differ between workers, on all of them.

        Raises:
            DataParallelError: names the first parameter that differs.
        """
        own = sorted(self._state), [optimizer.signature() for optimizer in optimizers]
        first, *others = self.workers.gathered(own)
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

    def leave(self) -> None:
        """Wait until `train` has returned on all workers, and answer clients meanwhile.

        Raises:
            CollectiveMismatch, DataParallelError: other workers go on with steps.
        """
        self._close()
        self._answers_at_once = True
        self._answer_requests()
        if self._options.may_change and not self.workers.has_met:
            self._synchronize(self._positions(is_first=True))
        while self.workers.has_met and self.workers.membership.world_size > 1:
            with contextlib.suppress(GenerationOver):
                if not self.workers.backend.agree(-1 - self.step):
                    raise DataParallelError(
                        f"{self.workers.node.name} returned from `train` after {self.step} steps, and others after "
                        "another number: all workers must make the same steps"
                    )
                return
            if not self._options.may_change:
                return  # another worker has failed, or is gone since all have agreed
            self._synchronize(self._positions())

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all that `steps` was given.

        Raises:
            NotSupported: no worker has all of it.
        """
        if any(optimizer.is_sharded for optimizer in self._optimizers):
            raise NotSupported("state_dict() of a training with zero=1 is not there yet: load a checkpoint of it")
        return {name: part.state_dict() for name, part in self._state.items()}

    @property
    def models(self) -> list[nn.Module]:
        return list(dict.fromkeys(optimizer.model for optimizer in self._optimizers))

    def _undoing(self) -> Callable[[], None]:
        """Return a function that brings all back to the present state which only a dropped step may have changed."""
        trained = {id(part) for one in self._optimizers for part in (one, one.model)}
        kept = {name: copy.deepcopy(part.state_dict()) for name, part in self._state.items() if id(part) not in trained}
        options = [
            (group, {name: copy.copy(value) for name, value in group.items() if name != "params"})
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
        with generators_locked():  # a worker in another thread may be in a shard
            generators = torch.get_rng_state(), random.getstate()

        def undo() -> None:
            for name, state in kept.items():
                self._state[name].load_state_dict(state)
            for group, values in options:
                group.update(values)
            with generators_locked():
                torch.set_rng_state(generators[0])
                random.setstate(generators[1])

        return undo

    def _all_checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._state)
        return self._checkpoints

    def _save(self) -> None:
        with contextlib.ExitStack() as whole:
            for optimizer in self._optimizers:
                if optimizer.is_sharded:
                    whole.enter_context(optimizer.whole_state())
            if self.workers.membership.rank == 0:
                self._all_checkpoints().save(self.step, wait=False)

    def _restore(self) -> None:
        if self._state and (found := self._all_checkpoints().restore()) is not None:
            self.step = found.step
            _log.info("going on from step %d, as %s has it", found.step, found.path)

    # ---- questions of clients ----

    def ask(self, question: Callable[[], T]) -> T:
        """Return the answer to a client's question, found between two steps. For any thread."""
        future: Future[T] = Future()
        self._requests.put((question, future))
        if self._answers_at_once:
            self._answer_requests()
        return future.result()

    def _answer_requests(self) -> None:
        with self._answering, contextlib.suppress(queue.Empty):
            while True:
                question, future = self._requests.get_nowait()
                try:
                    future.set_result(question())
                except Exception as error:  # belongs to the client
                    future.set_exception(error)

    def close(self) -> None:
        """Let go of the group and of the models' hooks."""
        self._answers_at_once = True
        self._answer_requests()
        for optimizer in self._optimizers:
            optimizer.close()
        self.workers.close()


def _own_state(part: Any) -> Any:
    return part.own_state() if isinstance(part, ReplicaOptimizer) else part.state_dict()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _described(tensor: tuple[str, list[int], str]) -> str:
    name, shape, dtype = tensor
    return f"{name} ({dtype.removeprefix('torch.')} {shape})"
