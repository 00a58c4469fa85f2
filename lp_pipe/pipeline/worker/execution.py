"""The executor of a schedule's actions on a worker's stages: receives, computes and sends what each action needs."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError, add_note
from lp_pipe.pipeline.compute.stage import EVALUATION, Stage
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers.batch_dims import unmarked
from lp_pipe.pipeline.layers.batch_gradients import detached_copy, gradients_of, with_gradient
from lp_pipe.pipeline.layers.message import Message
from lp_pipe.pipeline.layers.model import Loss
from lp_pipe.pipeline.loss_metrics import add_metrics
from lp_pipe.pipeline.protocol import NOTHING_MORE, Report, Wanted
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.schedule.ir import WORDS
from lp_pipe.pipeline.worker.links import Links
from lp_pipe.pipeline.worker.side_channels import SideChannels
from lp_pipe.telemetry import positions, tracing
from lp_pipe.training.device import autocast, to_host
from lp_pipe.training.gradients import scaled
from lp_pipe.training.rng import step_rng


@dataclass
class Operation:
    """The state of the operation that is running.

    weights: of the micro-batches' losses in the report. gradient_weights: in the gradients, if these differ.
    first_number: the number under which the first micro-batch is stashed, if operations overlap.
    """

    tag: int
    step: int
    inputs: Sequence[Any] | Mapping[int, Any]
    targets: list[Any]
    weights: list[float]
    report: Report
    scale: float | None = None
    gradient_weights: list[float] | None = None
    first_number: int = 0
    wanted: Wanted = NOTHING_MORE
    losses: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # and the gradients they begin with
    unreported: list[tuple[Tensor, float]] = field(default_factory=list)  # losses, with their weights

    def report_losses(self) -> None:
        """Add the losses to the report. This waits for the device, once for all micro-batches."""
        for loss, weight in self.unreported:
            self.report.loss += loss.item() * weight
        self.unreported.clear()

    def draws(self, microbatch: int) -> tuple[int, int]:
        """Return the step and micro-batch for `step_rng`; all micro-batches of an evaluation draw the same numbers."""
        return (self.step, 0 if self.step == EVALUATION else microbatch)

    @property
    def when(self) -> str:
        """Say which operation this is, for messages."""
        return "in eval mode" if self.step == EVALUATION else f"step {self.step}"


RunAction = Callable[[Action, Operation], None]


class Hook(ABC):
    """Something that is done around the actions of operations: a measurement, a search, a check."""

    @abstractmethod
    def operation(self) -> AbstractContextManager[object]:
        """Return the context of an operation. Its actions go through `around`."""

    @abstractmethod
    def around(self, run: RunAction, action: Action, operation: Operation) -> None:
        """Run an action, and do what the hook is for before and after it."""


@contextlib.contextmanager
def hooked(doing: Mapping[str, RunAction], hooks: Iterable[Hook]) -> Iterator[Mapping[str, RunAction]]:
    """Yield what to call for the actions of an operation in place of `doing`, so that all hooks see them."""
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.operation())
            doing = {op: partial(hook.around, run) for op, run in doing.items()}
        yield doing


class _Route(NamedTuple):
    """The part of an action that is the same in every operation: to look it up takes as long as a small layer.

    receive: gets the input or gradient of the operation with a tag; None: it comes from the batch, or the loss.
    send: sends the result; None: there is nowhere to send it.
    """

    name: str
    word: str
    stage_index: int
    stage: Stage
    microbatch: int
    is_last: bool
    receive: Callable[[int], Any] | None
    send: Callable[[int, Any], None] | None

    def input_of(self, operation: Operation) -> Message:
        """Return the input of a forward."""
        if self.receive is None:
            value = operation.inputs[self.microbatch]
            return with_gradient(value) if operation.wanted.input_grad else Message(value, ())
        return Message(*self.receive(operation.tag))

    def hand_on(self, operation: Operation, value: Any) -> None:
        """Send a forward's output to the next stage, if there is one."""
        if self.send is not None:
            self.send(operation.tag, self.stage.message_of(value).parts)

    def note(self, operation: Operation, start: float) -> None:
        """Report that the action is done, and has computed since `start`."""
        end = time.monotonic()
        operation.report.busy_s += end - start
        operation.report.spans.append((self.name, start, end))
        recorder = tracing.recorder
        if recorder is not None:
            args = {"stage": self.stage_index, "microbatch": self.microbatch, "step": operation.step}
            if operation.step == EVALUATION:
                del args["step"]
            recorder.add(self.word, tracing.COMPUTE, start, end, **args)


class Execution:
    """Runs actions on `stages` of the worker `name`, over the channels of `links` and `side`."""

    def __init__(
        self,
        config: PipelineConfig,
        stages: Mapping[int, Stage],
        links: Links,
        side: SideChannels,
        name: str,
        device: torch.device,
        criterion: Loss | None,
    ) -> None:
        self._device = device
        self._config = config
        self._criterion = criterion
        self._loss_place = stages[config.last_stage].last_layer + 1 if config.last_stage in stages else 0
        self._channels = config.channels
        self._stages = stages
        self._links = links
        self._side = side
        self._name = name
        self.training: Mapping[str, RunAction] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._backward_weights,
        }
        self.inference: Mapping[str, RunAction] = {"F": self._infer}
        self._routes: dict[Action, _Route] = {}
        self._at: tuple[Action, Operation] | None = None
        positions.add(self)

    def position(self) -> str:
        """Say what the worker is doing, for hang reports."""
        at = self._at
        if at is None:
            return "between two operations"
        action, operation = at
        done = len(operation.report.spans)
        return f"{self._describe(action)}, {operation.when}, {done} action{'s' * (done != 1)} done"

    def run(self, actions: Iterable[Action], operation: Operation, doing: Mapping[str, RunAction]) -> None:
        """Do one action after another. doing: `training` or `inference`, perhaps `hooked`.

        Raises:
            Exception: a layer's own, with a note that says where.
            ChannelClosed: a neighbour has ended, or the operation was aborted.
        """
        try:
            for action in actions:
                self._at = action, operation
                doing[action.op](action, operation)
        except BaseException as error:  # layers may end in SystemExit, too
            if self._at is not None:
                add_note(error, f"in {self._name}, {self._describe(self._at[0])}, {operation.when}")
            raise
        finally:
            self._at = None

    def _forward(self, action: Action, operation: Operation) -> None:
        route = self._route(action)
        message = route.input_of(operation)
        skips = self._side.values(action, operation.tag)
        start = time.monotonic()
        number = operation.first_number + action.microbatch
        value = route.stage.forward(message, operation.step, action.microbatch, skips, number)
        if route.is_last:
            if operation.wanted.outputs:  # before the loss, which may write to it
                operation.report.outputs[action.microbatch] = to_host(detached_copy(value), self._device)
            operation.losses[action.microbatch] = self._loss(value, action.microbatch, operation)
        route.note(operation, start)
        route.hand_on(operation, value)
        self._side.send_values(action, operation.tag, skips)

    def _backward(self, action: Action, operation: Operation) -> None:
        route = self._route(action)
        defer_weights = action.op == "I"
        number = operation.first_number + action.microbatch
        if route.receive is None:
            start = time.monotonic()
            root = operation.losses.pop(action.microbatch)
            gradients = route.stage.backward_from_loss(number, *root, defer_weights=defer_weights)
        else:
            received = route.receive(operation.tag)
            more = self._side.roots(action, operation.tag)
            start = time.monotonic()
            gradients = route.stage.backward(number, received, more, defer_weights=defer_weights)
        route.note(operation, start)
        if route.send is not None:
            route.send(operation.tag, gradients)
        elif operation.wanted.input_grad:
            value = operation.inputs[action.microbatch]
            found = to_host(gradients_of(value, gradients, operation.scale), self._device)
            operation.report.input_gradients[action.microbatch] = found
        self._side.send_gradients(action, operation.tag)

    def _backward_weights(self, action: Action, operation: Operation) -> None:
        route = self._route(action)
        more = self._side.roots(action, operation.tag)
        start = time.monotonic()
        route.stage.backward_weights(action.microbatch, more)
        route.note(operation, start)
        self._side.send_gradients(action, operation.tag)

    def _infer(self, action: Action, operation: Operation) -> None:
        route = self._route(action)
        message = route.input_of(operation)
        skips = self._side.values(action, operation.tag)
        start = time.monotonic()
        value = route.stage.infer(message, skips)
        if route.is_last:
            if operation.targets:
                self._loss(value, action.microbatch, operation)
            else:
                operation.report.outputs[action.microbatch] = to_host(value, self._device)
        route.note(operation, start)
        route.hand_on(operation, value)
        self._side.send_values(action, operation.tag, skips)

    def _route(self, action: Action) -> _Route:
        route = self._routes.get(action)
        if route is None:
            receives, sends = self._channels.receives(action), self._channels.sends(action)
            route = self._routes[action] = _Route(
                str(action),
                WORDS[action.op],
                action.stage,
                self._stages[action.stage],
                action.microbatch,
                action.stage == self._config.last_stage,
                None if receives is None else self._links.receiving(receives, action.microbatch),
                None if sends is None else self._links.sending(sends, action.microbatch),
            )
        return route

    def _loss(self, output: Any, microbatch: int, operation: Operation) -> tuple[Tensor, Tensor]:
        """Return the loss of one micro-batch and the gradient that its backward begins with; report the weighted loss.

        That gradient is what a product with the weight would hand down to the loss. The loss draws random numbers as a
        layer behind the last one would: a sample or noise is the same in every run.
        """
        draws = step_rng(self._config.seed, self._loss_place, *operation.draws(microbatch))
        with draws, autocast(self._config.precision, self._device.type):
            assert self._criterion is not None, "the last stage's worker has the loss"
            try:
                result = self._criterion(output, unmarked(operation.targets[microbatch]))
            except BaseException as error:
                add_note(error, "in the loss")
                raise
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            is_tensor = isinstance(loss, Tensor)
            what = f"one of shape {list(loss.shape)} and {loss.dtype}" if is_tensor else type(loss).__name__
            raise PipelineError(f"the loss function must return a real scalar tensor, or (scalar, metrics), not {what}")
        if type(metrics) is not dict and not isinstance(metrics, Mapping):
            raise PipelineError(f"the loss function's metrics must be a dict of numbers, not {type(metrics).__name__}")
        weight = operation.weights[microbatch]
        report = operation.report
        operation.unreported.append((loss.detach().clone(), weight))
        if metrics:
            add_metrics(report.metrics, metrics, weight)
        if operation.gradient_weights is not None:
            weight = operation.gradient_weights[microbatch]
        if operation.scale is None:
            return loss, torch.full_like(loss, weight)
        product = scaled(loss * weight, operation.scale)
        return product, torch.ones_like(product)

    def _describe(self, action: Action) -> str:
        stage = self._stages[action.stage]
        layers = f"layers {stage.first_layer} to {stage.last_layer}"
        return f"{WORDS[action.op]} of micro-batch {action.microbatch}, stage {action.stage} ({layers})"
