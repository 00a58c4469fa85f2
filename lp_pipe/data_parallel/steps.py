"""A worker's part in the steps of all workers: sums and commits, and questions of clients between two steps."""

import contextlib
import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lp_pipe.collectives.backend import GenerationOver, place_of_call
from lp_pipe.collectives.group import Group
from lp_pipe.context import stop_event
from lp_pipe.data_parallel.async_parameters import AsyncTraining
from lp_pipe.data_parallel.optimizer import ReplicaOptimizer
from lp_pipe.data_parallel.rejoining import Position, Rejoining, is_step_finished
from lp_pipe.data_parallel.step_times import StepTimes
from lp_pipe.data_parallel.training_state import TrainingState
from lp_pipe.data_parallel.workers import NEVER_MEET, ReplicaWorkers
from lp_pipe.errors import DataParallelError, NotSupported, Unavailable
from lp_pipe.telemetry import tracing
from lp_pipe.training.rng import step_rng

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Stand for an optimizer's number where a worker needs the state of none: a client waits for all state; it leaves.
_CLIENT_WAITS, _LEAVES = -1, -2
_OPTIMIZER_PLACE = -1  # the number that stands for a replica in `step_rng` while an optimizer draws


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
    wants_whole: bool = False  # whether a client waits for state that the workers have in shards
    changed: list[bool] = field(default_factory=list)  # buffers that replica 0 has written to
    has_warned: bool = False
    ms_by_rank: list[float] = field(default_factory=list)  # of computation per micro-batch

    @property
    def has_values(self) -> bool:
        """Whether collectives of the user's code return values with a meaning."""
        return not (self.is_over or self.has_met)


class ReplicaSteps:
    """The steps of one worker. Used by the thread that runs `train`, except for `ask`."""

    def __init__(self, workers: ReplicaWorkers) -> None:
        self.workers = workers
        self._options = workers.options
        self.state = TrainingState(workers, self._flags)
        self.times = StepTimes(workers)
        self._rejoining = Rejoining(workers, self.state)
        self._now: _CurrentStep | None = None
        self._met: list[Position] = []  # the workers at the last meeting
        self._is_in_steps = False
        self._usual_shards_calls: int | None = None
        self._overlaps = False  # whether sums may begin before the optimizer's step
        self._state_requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._answering = threading.Lock()
        self._answers_at_once = False
        self._has_left = False  # whether other workers may be gone, whose shards an answer would need
        self._async = AsyncTraining(workers, self.state) if workers.options.is_async else None

    # ---- the loop over steps ----

    def run(self, count: int, save_every: int | None, state: Mapping[str, Any]) -> Iterator[int]:
        """Yield the numbers of the steps that are still to be done; see `Replica.steps`."""
        self._close()
        self.state.set_parts(state)
        if not self.state.is_trained and self._async is not None:
            self._async.begin(saves=save_every is not None)
        elif not self.state.is_trained:
            self._rejoin(self._rejoining.first_positions())
        self._is_in_steps = True
        try:
            while not self._are_done(count):
                if stop_event().is_set():  # not the end of the loop: what follows it may save a trained model
                    raise Unavailable(f"{self.workers.node.name}: the program stops before step {self.state.step}")
                self._answer_requests()
                self._open()
                before, recorder, start = self.state.step, tracing.recorder, time.monotonic()
                yield self.state.step
                self._close()
                if recorder is not None:
                    recorder.add("step", tracing.STEP, start, time.monotonic(), step=before)
                self.times.log(self.state.step, count)
                if save_every and self.state.step > before and self.state.step % save_every == 0:
                    self._save()
            if self._async is not None:
                self._async.end()
            self.state.wait_until_saved()
        finally:
            self._is_in_steps = False

    def _are_done(self, count: int) -> bool:
        """Return whether so many steps are done, and no death behind the loop could take them back."""
        state = self.state
        while state.step >= count and state.keeps_copies and state.step not in state.copied_steps():
            try:
                self._rejoining.copy_shards()
            except GenerationOver:
                self._rejoin(self._rejoining.meet())
        return state.step >= count

    def _save(self) -> None:
        """Save a checkpoint; where all workers write, again if they change meanwhile."""
        if self._async is not None:
            if self.workers.membership.rank == 0:
                with self.times.waiting():
                    self._async.save()
            return
        self._rejoining.saves, step = True, self.state.step
        while self._rejoining.saves:
            try:
                self.state.save()
                self._rejoining.saves = False
            except GenerationOver:
                if not self._options.may_change:
                    raise
                self._rejoining.synchronize(self._rejoining.meet())
                self._rejoining.saves = self.state.step == step
                self._overlaps = False
                self.times.begin()

    def _rejoin(self, positions: list[Position]) -> None:
        """Become the same as all workers of this generation."""
        if self._rejoining.synchronize(positions):
            self._save()
        self._overlaps = False
        self.times.begin()

    def add_optimizer(self, optimizer: ReplicaOptimizer) -> None:
        """Take in an optimizer; parameters and buffers become rank 0's, at the latest when `steps` begins.

        Raises:
            DataParallelError: the workers' models differ.
        """
        self.state.add_optimizer(optimizer)
        if self._now is not None:  # made inside a step
            optimizer.begin_step(self.workers.exchange, self._flags)
        if not self._options.may_change:
            self.state.copy_model(optimizer)

    def begin_shards(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Note that the shards of a batch begin; return the number of the first micro-batch, by replica.

        counts: the number of micro-batches, by replica.
        """
        now = self._open()
        now.shards_calls += 1
        if now.shards_calls == 1 and now.has_values:
            with self._over_noted():
                for optimizer in self.state.optimizers:
                    optimizer.follow_freezing()
        first = dict(now.microbatches)
        for replica, count in counts.items():
            now.microbatches[replica] = first.get(replica, 0) + count
        return first

    @property
    def has_values(self) -> bool:
        """Whether this step will not be dropped, as far as is known."""
        return self._now is None or self._now.has_values

    def makes_gradient_of(self, replica: int) -> bool:
        """Return whether a hosted replica takes part in this step."""
        return self._async is None or self._async.makes_gradient_of(replica)

    def select(self, replica: int, *, is_last: bool) -> None:
        """Let the next backwards belong to a replica. is_last: no shard of this replica comes after."""
        self._open().fires_at_call = None
        self.state.buffers.select(replica)
        for optimizer in self.state.optimizers:
            optimizer.buckets.select(replica - self.workers.replicas.start, is_last=is_last)

    def open_window(self) -> None:
        """Note that this worker's last shard of the batch begins, if it has one."""
        is_usual = self._open().shards_calls == self._usual_shards_calls and len(self.state.optimizers) == 1
        for optimizer in self.state.optimizers:
            optimizer.buckets.open_window(sends_early=self._overlaps and is_usual)

    def close_window(self) -> None:
        """Note that this worker's last shard of the batch has ended."""
        for optimizer in self.state.optimizers:
            optimizer.buckets.close_window()

    def group_for_call(self) -> Group | None:
        """Return the group for a collective of all workers, after the sum of gradients that may be summed already.

        None, and Raises: as `group_beside_sums`.
        """
        group = self.group_beside_sums()
        if group is not None:
            for optimizer in self.state.optimizers:
                optimizer.drain()
            if self._now is not None:
                self._now.fires_at_call = self._fires
        return group

    def group_beside_sums(self) -> Group | None:
        """Return the group for a collective of the user's code; None: its result has no meaning in this step.

        Raises:
            RuntimeError: workers may change, and `steps` has not begun.
            NotSupported: the workers never meet.
        """
        if self._options.never_meet:
            raise NotSupported(f"a collective of the workers: {NEVER_MEET}")
        if self._options.may_change and not self.state.is_trained:
            raise RuntimeError(
                f"a collective before replica.steps(): with on_failure={self._options.on_failure!r} a worker may join "
                "later, and would not take part in it: use collectives inside the loop over steps"
            )
        return self.workers.group if self.has_values else None

    def warn_of_no_meaning(self) -> None:
        """Warn once that a collective in the rest of a finished step has no meaning; a dropped step comes again."""
        now = self._now
        if now is not None and now.phase is StepPhase.COMMITTED and not now.has_warned:
            now.has_warned = True
            _log.warning(
                "%s: workers changed in step %d, which is finished: its collectives after optimizer.step() return "
                "this worker's own values, at %s; those of the next step are right",
                self.workers.node.name,
                self.state.step,
                place_of_call(),
            )

    def generation_is_over(self, error: GenerationOver) -> None:
        """Note that an operation has failed because the members change; raise the error if they may not."""
        if not self._options.may_change or self._now is None:
            raise error
        self._now.is_over = True

    def optimizer_step(self, optimizer: ReplicaOptimizer) -> bool:
        """Sum what is left, commit if it is the step's last optimizer, and update; False: the step is dropped."""
        now = self._open()
        if not now.shards_calls and now.has_values:
            with self._over_noted():
                optimizer.follow_freezing()
        if not now.shards_calls and self.workers.membership.world_size != self._options.replicas:
            raise DataParallelError(
                f"optimizer.step() without replica.shards() needs {self._options.replicas} workers, one for each "
                f"replica, and there are {self.workers.membership.world_size}"
            )
        is_last = len({*now.stepped, optimizer}) == len(self.state.optimizers)
        may_finish = False
        if now.has_values:
            with self._over_noted():
                is_only = len(self.state.optimizers) == 1
                with self.times.summing():
                    has_sums = optimizer.finish_sums(may_be_late=is_only and not self._options.may_change)
                self._note_flags(now, optimizer)
                if is_last:
                    with self.times.waiting():
                        if self._options.is_async:
                            self.state.buffers.keep_only(self.workers.replicas.start)
                        else:
                            self.state.share_buffers(now.changed)
                            may_finish = True
                        if has_sums and not self._options.is_async:  # else the servers have seen that all are there
                            self._agree()
                    self.times.begin_next_step()
        if now.is_over and not now.has_met:
            self._meet_again(now, may_finish=may_finish)
        if now.phase is StepPhase.DROPPED:
            optimizer.clear_gradients()
            return False
        if self._async is not None:
            optimizer.clip()
            with self.times.waiting():
                self._async.apply_gradients(optimizer, self.state.step)
            optimizer.clear_gradients()
        else:
            place = _OPTIMIZER_PLACE, self.state.step, len(now.stepped)
            with self.times.entering(step_rng(self._options.seed, *place)):
                optimizer.apply(keeps_undo=self._options.may_change and not is_last)
        if now.has_values:
            with self.times.waiting(), self._over_noted():
                optimizer.exchange_updates()  # not before: workers in other threads wait for the random numbers
        now.stepped.append(optimizer)
        if is_last:
            now.phase = StepPhase.COMMITTED
            if self.state.has_mirrors and not now.has_values:  # the rest of the body may use the parameters
                if not now.has_met:
                    self._meet_again(now, may_finish=False)
                self._met = self._rejoining.deal_shards(self._met)
            if not self._is_in_steps:
                self._close()
        return True

    def _open(self) -> _CurrentStep:
        if self._now is None:
            self.state.buffers.begin_step()
            for optimizer in self.state.optimizers:
                optimizer.begin_step(self.workers.exchange, self._flags)
            may_drop = self._options.may_change and self._is_in_steps and self._async is None
            self._now = _CurrentStep(self.state.undoing() if may_drop else lambda: None)
            self._now.changed = [False] * self.state.buffers.count
        return self._now

    def _close(self) -> None:
        """End the current step, if there is one: commit it if that is still to be done, or go back to its beginning."""
        now = self._now
        if now is None:
            return
        if now.phase is StepPhase.OPEN and now.has_values:
            with self._over_noted():
                if not self._options.is_async:
                    self._agree()
                now.phase = StepPhase.COMMITTED
        if now.is_over and not now.has_met and self._meet_again(now, may_finish=False):
            now.phase = StepPhase.COMMITTED
        self._now = None
        if now.phase is StepPhase.DROPPED:
            self.state.buffers.restore()
            for optimizer in now.stepped:
                optimizer.undo()
            now.undo()
        else:
            if now.ms_by_rank and not now.has_met:
                sums = [one for optimizer in self.state.optimizers for one in optimizer.buckets.sums]
                self.times.note(self.state.step, now.ms_by_rank, sums)
            self.state.step += 1
            if self._async is not None:
                self._async.note_step()
            self._usual_shards_calls = now.shards_calls
            is_copied = self.state.keeps_copies and self.state.step % self._options.mirror_every == 0
            if (now.wants_whole or is_copied) and not now.has_met:
                with self._over_noted_in(now):
                    if now.wants_whole:
                        self._answer_with_shards()
                    if is_copied:
                        self._rejoining.copy_shards()
                if now.is_over:
                    self._met = self._rejoining.meet()
                    now.has_met = True
        if now.has_met:
            self._rejoin(self._met)

    # ---- sums and commits ----

    def _flags(self) -> list[float]:
        """Return what all workers must know of this one: gradients after a collective, its time, its buffers."""
        now = self._now
        is_late = now is not None and now.fires_at_call is not None and self._fires > now.fires_at_call
        hosts_first = self.workers.replicas.start == 0
        changed = self.state.buffers.changed_by(0) if hosts_first else [False] * self.state.buffers.count
        own_ms = self.times.by_rank(sum(now.microbatches.values()) if now is not None else 1)
        wants_whole = self.state.is_sharded and not self._state_requests.empty()
        return [float(is_late), float(wants_whole), *own_ms, *map(float, changed)]

    @property
    def _fires(self) -> int:
        return sum(optimizer.buckets.fires_in_window for optimizer in self.state.optimizers)

    def _note_flags(self, now: _CurrentStep, optimizer: ReplicaOptimizer) -> None:
        world = self.workers.membership.world_size
        is_late, wants_whole, *others = optimizer.buckets.extra_flags
        now.wants_whole = now.wants_whole or bool(wants_whole)
        now.ms_by_rank = others[:world]
        now.changed = [bool(flag) for flag in others[world:]]
        self._overlaps = not is_late
        optimizer.buckets.learn()

    def _agree(self) -> None:
        if not self.workers.backend.agree(self.state.step):
            raise DataParallelError(
                f"the workers of group {self._options.group!r} are at different steps; {self.workers.node.name} is at "
                f"{self.state.step}: all must make the same steps"
            )

    @contextlib.contextmanager
    def _over_noted_in(self, now: _CurrentStep) -> Iterator[None]:
        """Note in a step that has ended that the members change."""
        try:
            yield
        except GenerationOver:
            if not self._options.may_change:
                raise
            now.is_over = True

    @contextlib.contextmanager
    def _over_noted(self) -> Iterator[None]:
        try:
            yield
        except GenerationOver as error:
            self.generation_is_over(error)

    # ---- other workers ----

    def _meet_again(self, now: _CurrentStep, *, may_finish: bool) -> bool:
        """Meet the workers that are left or new, and return whether this step is finished; else it is dropped."""
        is_committed = now.phase is StepPhase.COMMITTED
        self._met = self._rejoining.meet(self._rejoining.own_position(is_committed=is_committed, holds_sum=may_finish))
        now.has_met = True
        if is_committed or (may_finish and is_step_finished(self._met, self.state.step)):
            return True
        now.phase = StepPhase.DROPPED
        return False

    def leave(self) -> None:
        """Wait until `train` has returned on all workers, and answer clients meanwhile.

        Raises:
            CollectiveMismatch, DataParallelError: other workers go on with steps.
        """
        self._close()
        for optimizer in self.state.optimizers:
            optimizer.late.finish()
        self._answers_at_once = True
        self._answer_requests()
        try:
            self._wait_for_others()
        finally:
            self._end_requests()

    def _wait_for_others(self) -> None:
        if self._options.never_meet:
            self.leave_servers()
            return
        if self._options.may_change and not self.workers.has_met:
            self._rejoin(self._rejoining.first_positions())
        while True:
            with contextlib.suppress(GenerationOver):
                if self.state.is_sharded:
                    self._outside_of_steps(_LEAVES)
                if self.workers.membership.world_size > 1 and not self.workers.backend.agree(-1 - self.state.step):
                    raise DataParallelError(
                        f"{self.workers.node.name} returned from `train` after {self.state.step} steps, and others "
                        "after another number: all workers must make the same steps"
                    )
                return
            if not self._options.may_change:
                return  # another worker has failed, or is gone since all have agreed
            self._rejoining.synchronize(self._rejoining.meet())

    def leave_servers(self) -> None:
        """Tell servers that workers which never meet train on that this one has ended."""
        if self._async is not None and self._options.never_meet:
            self._async.leave()

    def optimizer_state(self, optimizer: ReplicaOptimizer) -> dict[str, Any]:
        """Return an optimizer's whole state, which is in shards; all workers call this.

        In the rest of a step in which workers have changed it has no meaning, and is empty.
        """
        if self._now is None:
            return self._outside_of_steps(self.state.optimizers.index(optimizer))
        if not optimizer.moves_shards:
            return optimizer.gathered_state(keeps=True)
        with self._over_noted():
            if self.group_for_call() is not None:
                return optimizer.gathered_state(keeps=True)
        self.warn_of_no_meaning()
        return {**optimizer.inner.state_dict(), "state": {}}

    def _outside_of_steps(self, wanted: int) -> dict[str, Any]:
        """Return the whole state of an optimizer, by its number; with _LEAVES wait until no worker needs one any more.

        A worker that joins after the last step runs the code behind the loop later than the others, which wait here
        for it. Here they also gather the state for clients that have asked after the last step.

        Raises:
            DataParallelError: the workers have gone back to a step of the loop that has ended here.
        """
        while True:
            try:
                if wanted < 0:
                    wanted = _LEAVES if self._state_requests.empty() else _CLIENT_WAITS
                number: int = max(self.workers.gathered(wanted))
                if number == _LEAVES:
                    return {}
                if number == _CLIENT_WAITS:
                    self._answer_with_shards()
                    continue
                found: dict[str, Any] = self.state.optimizers[number].gathered_state(keeps=number == wanted)
                if number == wanted:
                    return found
            except GenerationOver:
                if not self._options.may_change:
                    raise
                step = self.state.step
                self._rejoin(self._rejoining.meet())
                if self.state.step < step:
                    raise DataParallelError(
                        f"workers died after step {step}, and their shards of the optimizer's state with them: "
                        f"{self.workers.node.name} cannot go back to step {self.state.step} once its loop has ended"
                    ) from None

    # ---- questions of clients ----

    def ask(self, question: Callable[[], T]) -> T:
        """Return the answer to a client's question, found between two steps. For any thread."""
        future: Future[T] = Future()
        self._requests.put((question, future))
        if self._answers_at_once:
            self._answer_requests()
        return future.result()

    def ask_for_state(self, question: Callable[[], T]) -> T:
        """Return the answer to a question about state, part of which other workers may have. For any thread.

        Raises:
            Unavailable: the state is in shards, and training has ended.
        """
        future: Future[T] = Future()
        self._state_requests.put((question, future))
        if self._answers_at_once:
            self._answer_requests()
        if self._has_left:
            self._refuse_requests()
        return future.result()

    def _end_requests(self) -> None:
        """Answer and refuse the questions that are left; those that come later, too."""
        self._has_left = self._answers_at_once = True
        self._answer_requests()
        self._refuse_requests()

    def _refuse_requests(self) -> None:
        for _, future in _taken(self._state_requests):
            future.set_exception(
                Unavailable(
                    f"{self.workers.node.name} has only a shard of the state (zero), and training has ended: ask "
                    "before `train` returns, or save a checkpoint (steps(save_every=…)), and load that"
                )
            )

    def _answer_requests(self) -> None:
        self._answer(_taken(self._requests))
        if not self.state.is_sharded:
            self._answer(_taken(self._state_requests))

    def _answer_with_shards(self) -> None:
        """Gather all state for the clients that wait for it; all workers call this.

        Raises:
            GenerationOver: a worker is gone.
        """
        asked = _taken(self._state_requests)
        try:
            with self.state.whole(keeps=bool(asked)):
                self._answer(asked)
        except BaseException:
            for question, future in asked:
                if not future.done():
                    self._state_requests.put((question, future))
            raise

    def _answer(self, asked: "list[tuple[Callable[[], Any], Future[Any]]]") -> None:
        with self._answering:
            for question, future in asked:
                try:
                    future.set_result(question())
                except Exception as error:  # belongs to the client
                    future.set_exception(error)

    def close(self) -> None:
        """Let go of the group and of the models' hooks."""
        self._end_requests()
        for optimizer in self.state.optimizers:
            optimizer.close()
        self.workers.close()


def _taken(requests: "queue.SimpleQueue[T]") -> list[T]:
    """Return what is in the queue, and leave it empty."""
    found: list[T] = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(requests.get_nowait())
    return found
