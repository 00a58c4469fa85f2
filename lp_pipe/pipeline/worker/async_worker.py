"""A worker's steps of an asynchronous schedule: updates between backwards, and the next step's first forwards."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from lp_pipe.errors import ChannelClosed, noting
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.compute.weight_versions import WeightVersions
from lp_pipe.pipeline.protocol import Report, StepTask
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.schedule.updates import Timing, Turn, turns
from lp_pipe.pipeline.worker.execution import Execution, Hook, Operation, hooked
from lp_pipe.pipeline.worker.metering import Metering
from lp_pipe.pipeline.worker.microbatch_source import MicrobatchSource
from lp_pipe.pipeline.worker.nonfinite import UpdateGuard
from lp_pipe.pipeline.worker.reduction import Reduction
from lp_pipe.pipeline.worker.training import Training
from lp_pipe.training.buffer_snapshot import BufferSnapshot


class StepOrder:
    """The order of the steps that a worker was asked for: one after the other. Each step has a thread and a tag."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = self._failed = 0  # the last step's tag
        self._aborted: tuple[int, str] = (0, "")

    @contextmanager
    def step(self, tag: int, after: int) -> Iterator[None]:
        """Let the body be step `tag`: it begins once step `after` has ended (0: there is none).

        Raises:
            ChannelClosed: step `after` has failed, or step `tag` was aborted.
        """
        has_ended = False
        try:
            self._wait_for(after, tag)
            yield
            has_ended = True
        finally:
            with self._changed:
                self._ended = tag
                self._failed = self._failed if has_ended else tag
                self._changed.notify_all()

    def abort(self, tag: int, reason: str) -> None:
        """Make steps up to `tag` fail that still wait."""
        with self._changed:
            self._aborted = (tag, reason)
            self._changed.notify_all()

    def _wait_for(self, after: int, tag: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= after or self._aborted[0] >= tag)
            if self._aborted[0] >= tag:
                raise ChannelClosed(self._aborted[1])
            if after and self._failed == after:
                raise ChannelClosed(f"step with tag {tag} does not begin: the step before it, tag {after}, has failed")


class Lookahead(ABC):
    """Forwards of the next step, and earlier weights: all that a worker has beside its current step."""

    @abstractmethod
    def abort(self, tag: int, reason: str) -> None:
        """Make operations up to `tag` fail that have not begun."""

    @abstractmethod
    def discard(self) -> None:
        """Forget the next step's forwards, which will be done again."""

    @abstractmethod
    def forget_versions(self) -> None:
        """Forget earlier weights: the current ones have come from elsewhere."""

    @abstractmethod
    def between_steps(self) -> AbstractContextManager[None]:
        """Return a context in which buffers are as after the last whole step."""

    @abstractmethod
    def versions(self) -> list[dict[str, Any]]:
        """Return what a checkpoint needs beside the newest weights to go on with the same bits: nothing, or one."""

    @abstractmethod
    def restore(self, versions: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the `versions` of the workers that wrote a checkpoint."""


class NoLookahead(Lookahead):
    """The lookahead of a synchronous schedule: a worker has nothing beside its current step."""

    def abort(self, tag: int, reason: str) -> None:
        pass

    def discard(self) -> None:
        pass

    def forget_versions(self) -> None:
        pass

    def between_steps(self) -> AbstractContextManager[None]:
        return nullcontext()

    def versions(self) -> list[dict[str, Any]]:
        return []

    def restore(self, versions: Sequence[Mapping[str, Any]]) -> None:
        pass


class AsyncWorker(Lookahead):
    """Runs the steps of an asynchronous schedule for one replica of a stage, in node `name`.

    timings: of all stages. share: (replica, replicas).
    If all stages update after the same micro-batches, the loss weights of these add up to 1, as in a step. Otherwise
    each micro-batch's gradients have the weight 1 on the way, and a stage takes the mean over its update group.
    """

    def __init__(
        self,
        name: str,
        stage: Stage,
        timings: Sequence[Timing],
        share: tuple[int, int],
        execution: Execution,
        training: Training,
        reduction: Reduction,
        microbatch_source: MicrobatchSource,
        metering: Metering,
        guard: UpdateGuard | None = None,
    ) -> None:
        self._name = name
        self._stage = stage
        self._timing = timings[stage.index]
        self._is_uniform = len({timing.every for timing in timings}) == 1
        self._share = share
        self._execution = execution
        self._training = training
        self._reduction = reduction
        self._microbatch_source = microbatch_source
        self._metering = metering
        self._guard = guard
        self._doing = execution.training
        self._modules = stage.modules()
        self._versions = WeightVersions(self._modules, training.named_parameters)
        self._next: Operation | None = None  # the next step, some forwards of which are done
        self._forwarded = 0
        self._boundary: BufferSnapshot | None = None  # the buffers before these forwards
        self._order = StepOrder()

    def run(self, task: StepTask, following: StepTask | None, after: int, hooks: tuple[Hook, ...]) -> Report:
        """Run one step.

        following: the next one; its first forwards are done on the way. after: the tag of the one before; 0: none.

        Raises:
            Exception: a layer's own, with a note that says where; the optimizer's.
            ChannelClosed: a neighbour has ended, or the step was aborted.
        """
        with self._order.step(task.tag, after):
            if self._guard is not None:
                hooks = (self._guard, *hooks)
            try:
                with hooked(self._execution.training, hooks) as self._doing:
                    return self._run(task, following)
            finally:
                self._versions.use_own()

    def abort(self, tag: int, reason: str) -> None:
        self._order.abort(tag, reason)

    def discard(self) -> None:
        if self._boundary is not None:
            self._boundary.restore()
        self._stage.discard()
        self._next, self._forwarded, self._boundary = None, 0, None

    def forget_versions(self) -> None:
        self.discard()
        self._versions.forget()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        if self._boundary is None:
            yield
        else:
            with self._boundary.swapped_in():
                yield

    def versions(self) -> list[dict[str, Any]]:
        return [{"newest": self._versions.newest, "older": self._versions.older()}]

    def restore(self, versions: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the versions of the workers that wrote a checkpoint, with the weights that this stage has now.

        If the stages are cut otherwise now, or update at other times, older weights may be missing: then forwards use
        the oldest ones that there are.
        """
        self.discard()
        own = [state for state in versions if state["older"]] or versions  # the others count other updates
        newest = max((state["newest"] for state in own), default=0)
        older: dict[int, dict[str, Tensor]] = {}
        for state in own:
            for version, weights in state["older"].items():
                older.setdefault(newest - state["newest"] + version, {}).update(weights)
        self._versions.restore(newest, older)

    def _run(self, task: StepTask, following: StepTask | None) -> Report:
        if self._next is None or self._next.tag != task.tag:
            self.discard()
            self._next = self._operation_of(task)
        operation, forwarded = self._next, self._forwarded
        first = self._versions.newest
        self._next, self._forwarded, self._boundary = None, 0, None
        count = following.microbatches if following is not None else 0
        where = f"in {self._name}, update of stages {self._stage.index}, step {task.step}"
        for turn in turns(self._timing, *self._share, task.microbatches, forwarded=forwarded, ahead=count):
            if turn.op == "U":
                with noting(where):
                    self._update(task, first, turn)
            elif turn.ahead:
                self._run_action(turn, self._operation_ahead(following, operation, task.microbatches), first)
                self._forwarded += 1
            else:
                self._run_action(turn, operation, first)
        with noting(where):
            self._training.step_scheduler()
        operation.report_losses()
        return operation.report

    def _operation_ahead(self, task: StepTask | None, operation: Operation, microbatches: int) -> Operation:
        if self._next is None:
            assert task is not None, "turns has been told of its micro-batches"
            self._boundary = BufferSnapshot(self._modules)
            self._next = self._operation_of(task)
            self._next.first_number = operation.first_number + microbatches
        return self._next

    def _operation_of(self, task: StepTask) -> Operation:
        operation = self._microbatch_source.operation(task)
        self._microbatch_source.weigh_in_groups(operation, self._timing.every if self._is_uniform else 1)
        return operation

    def _run_action(self, turn: Turn, operation: Operation, first: int) -> None:
        action = Action("F" if turn.op == "F" else "B", self._stage.index, turn.microbatch)
        version = self._versions.use(self._version_of(first + turn.group))
        operation.report.versions.append((str(action), version))
        self._execution.run([action], operation, self._doing)

    def _update(self, task: StepTask, first: int, turn: Turn) -> None:
        """Update with the gradients of the turn's update group. first: the number of groups before the step."""
        group, microbatches = first + turn.group, self._in_group(turn.group, task.microbatches)
        self._versions.take_gradients(self._version_of(group))
        if self._guard is not None:
            self._versions.use_own()
            self._guard.check_gradients(task.step, turn.group * self._timing.every + microbatches - 1)
        self._reduction.reduce(task.tag, self._training.parameters, (), BufferSnapshot(()))
        if microbatches > 1 and not self._is_uniform:
            self._training.scale_gradients(1 / microbatches)
        self._versions.begin_next(needed_from=self._version_of(group + 1))
        self._metering.before_update(self._versions.older_bytes)
        self._training.update(task.step, turn.group)

    def _version_of(self, group: int) -> int:
        return max(0, group - self._timing.delay)

    def _in_group(self, group: int, microbatches: int) -> int:
        every = self._timing.every
        return min(every, microbatches - group * every)
