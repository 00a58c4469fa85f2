"""One stage worker: owns its stages' parameters, and runs its share of a schedule on them."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.address import Address
from lp_pipe.channels import ChannelHub
from lp_pipe.channels.kinds import hub_endpoint
from lp_pipe.context import context
from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.batches import BatchSource
from lp_pipe.pipeline.build import build_layers
from lp_pipe.pipeline.channel_handle import ChannelTarget
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.links import Links
from lp_pipe.pipeline.manifest import SHARE
from lp_pipe.pipeline.message import Message, to_message
from lp_pipe.pipeline.microbatches import aligned, loss_weights, split
from lp_pipe.pipeline.schedule import Action, Schedule, forward_on
from lp_pipe.pipeline.side_channels import SideChannels
from lp_pipe.pipeline.stage import Stage, check_shapes
from lp_pipe.pipeline.tied import tie
from lp_pipe.pipeline.training import Saved, Training

_WORDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


@dataclass
class Report:
    """What a worker tells after its share of an operation. Times are time.monotonic() of its host."""

    busy_s: float = 0.0
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    gradient_norms: dict[int, list[Tensor]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)


@dataclass
class _Operation:
    """The state of the operation that is running."""

    tag: int
    step: int
    inputs: list[Any]
    targets: list[Any]
    weights: list[float]
    report: Report
    losses: dict[int, Tensor] = field(default_factory=dict)


_Run = Callable[[Action, _Operation], None]


class StageWorker:
    """Served by every node of a pipeline; called by its conductor only, one operation at a time."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        worker: WorkerConfig,
        channels: Address,
        neighbours: Mapping[int, ChannelTarget],
        feeder: Any = None,
    ) -> None:
        node = context()
        usual = node.services.endpoint_for(channels.id)
        self._hub = ChannelHub(hub_endpoint(pipeline.channel, usual), node.name)
        node.exit_stack.callback(self._hub.close, f"{node.name} has ended")
        node.services.register(channels.id, self._hub.endpoint)
        self._config = pipeline
        self._worker = worker.worker
        self._batches = BatchSource(feeder)
        self._name = node.name
        self._channels = pipeline.channels
        self._stages = {
            stage: _stage(stage, first, sources, pipeline, worker)
            for stage, (first, sources) in sorted(worker.sources.items())
        }
        self.training = Training(list(self._stages.values()), pipeline.optimizer, pipeline.lr_scheduler)
        self._saved: Saved | None = None
        self._links = Links(
            self._channels,
            worker.worker,
            self._hub,
            neighbours,
            kind=pipeline.channel,
            credits=pipeline.credits,
            name=node.name,
        )
        self._side = SideChannels(self._channels, self._links, self._stages)
        self._actions: dict[str, _Run] = {"F": self._forward, "W": self._backward_weights}
        self._actions |= {"B": self._backward, "I": self._backward}

    def train(
        self, tag: int, step: int, microbatches: int, given: tuple[Any] | None, target: tuple[Any] | None = None
    ) -> Report:
        """Run the schedule's actions for one step; gradients stay until `apply` or `discard`.

        given: the batch's input, for the first stage's worker. target: for the last stage's worker; None: ask the
        feeder. They are split here, because memory that was split before it came here would lie at other addresses.
        """
        schedule = self._config.schedule_for(microbatches)
        inputs = split(given[0], self._config.microbatches) if given is not None else []
        operation = self._operation(tag, step, inputs, self._targets(step, microbatches, target))
        self._run(schedule, operation, self._actions)
        if self._config.clip_grad_norm is not None:
            operation.report.gradient_norms = self.training.gradient_norms()
        return operation.report

    def infer(self, tag: int, microbatches: int, inputs: list[Any], targets: list[Any]) -> Report:
        """Run forwards in eval mode; the last stage reports the loss, or the outputs where there are no targets."""
        schedule = forward_on(self._config.placement, microbatches)
        operation = self._operation(tag, 0, aligned(inputs), aligned(targets))
        with torch.no_grad(), self._eval_mode():
            self._run(schedule, operation, {"F": self._infer})
        return operation.report

    def apply(self, total_norm: Tensor | None) -> None:
        """Clip by the norm of all stages' gradients, step the optimizer and its scheduler, clear the gradients."""
        self.training.step(total_norm, self._config.clip_grad_norm)

    def share_weights(self, tag: int) -> None:
        """Exchange the tied parameters that a step has changed with the other workers."""
        self._side.share_weights(tag)

    def discard(self) -> None:
        """Forget what an aborted operation has left behind."""
        self.training.clear_gradients()
        self._links.discard()
        for stage in self._stages.values():
            stage.discard()

    def abort(self, tag: int, reason: str) -> None:
        """Make operation `tag` fail wherever it waits; called while it runs."""
        self._links.abort(tag, reason)

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's part of the model."""
        return {name: value for stage in self._stages.values() for name, value in stage.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for stage in self._stages.values():
            stage.load_state_dict(state)

    def save(self, path: str, version: str) -> str:
        """Write this worker's share of a checkpoint into the folder; returns the file's name."""
        name = SHARE.format(version=version, worker=self._worker)
        self.training.save(path, name, self.state_dict())
        return name

    def read(self, path: str, files: list[str]) -> None:
        """Read the shares in the folder, and change nothing before `adopt`: the other workers may fail to.

        Raises:
            CheckpointError: a share is missing or damaged.
            PipelineError: it is of another model.
        """
        saved = self.training.read(path, files)
        check_shapes(saved.weights, self.state_dict(), f"{path} is a checkpoint")
        self._saved = saved

    def adopt(self) -> None:
        """Take what belongs to this worker's layers from what it has read."""
        saved, self._saved = self._saved, None
        assert saved is not None, "adopt comes after read"
        self.load_state_dict(saved.weights)
        self.training.restore(saved)

    def _operation(self, tag: int, step: int, inputs: list[Any], targets: list[Any]) -> _Operation:
        weights = loss_weights(targets, self._config.loss_weight) if targets else []
        return _Operation(tag, step, inputs, targets, weights, Report())

    def _run(self, schedule: Schedule, operation: _Operation, actions: Mapping[str, _Run]) -> None:
        for action in schedule.workers[self._worker]:
            try:
                actions[action.op](action, operation)
            except Exception as error:
                error.add_note(f"in {self._name}, {self._describe(action)}, step {operation.step}")
                raise

    def _forward(self, action: Action, operation: _Operation) -> None:
        message = self._input_of(action, operation)
        skips = self._side.values(action, operation.tag)
        start = time.monotonic()
        value = self._stages[action.stage].forward(message, operation.step, action.microbatch, skips)
        if action.stage == self._config.last_stage:
            loss = self._loss(value, action.microbatch, operation)
            operation.losses[action.microbatch] = loss
        self._note(action, operation, start)
        self._hand_on(action, operation, value, skips)

    def _backward(self, action: Action, operation: _Operation) -> None:
        stage = self._stages[action.stage]
        defer_weights = action.op == "I"
        if action.stage == self._config.last_stage:
            start = time.monotonic()
            loss = operation.losses.pop(action.microbatch)
            gradients = stage.backward_from_loss(action.microbatch, loss, defer_weights=defer_weights)
        else:
            channel = self._channels.receives(action)
            assert channel is not None, "only the last stage has nobody to wait for"
            received = self._links.receive(channel, operation.tag)
            more = self._side.roots(action, operation.tag)
            start = time.monotonic()
            gradients = stage.backward(action.microbatch, received, more, defer_weights=defer_weights)
        self._note(action, operation, start)
        channel = self._channels.sends(action)
        if channel is not None:
            self._links.send(channel, operation.tag, gradients)
        self._side.send_gradients(action, operation.tag)

    def _backward_weights(self, action: Action, operation: _Operation) -> None:
        more = self._side.roots(action, operation.tag)
        start = time.monotonic()
        self._stages[action.stage].backward_weights(action.microbatch, more)
        self._note(action, operation, start)
        self._side.send_gradients(action, operation.tag)

    def _infer(self, action: Action, operation: _Operation) -> None:
        message = self._input_of(action, operation)
        skips = self._side.values(action, operation.tag)
        start = time.monotonic()
        value = self._stages[action.stage].infer(message, action.microbatch, skips)
        if action.stage == self._config.last_stage:
            if operation.targets:
                self._loss(value, action.microbatch, operation)
            else:
                operation.report.outputs.append(value)
        self._note(action, operation, start)
        self._hand_on(action, operation, value, skips)

    def _input_of(self, action: Action, operation: _Operation) -> Message:
        channel = self._channels.receives(action)
        if channel is None:
            return Message(operation.inputs[action.microbatch], ())
        value, wants_gradient = self._links.receive(channel, operation.tag)
        return Message(value, wants_gradient)

    def _hand_on(self, action: Action, operation: _Operation, value: Any, skips: Mapping[str, Any]) -> None:
        channel = self._channels.sends(action)
        if channel is not None:
            message = to_message(value)
            self._links.send(channel, operation.tag, (message.value, message.wants_gradient))
        self._side.send_values(action, operation.tag, skips)

    def _loss(self, output: Any, microbatch: int, operation: _Operation) -> Tensor:
        """The weighted loss of one micro-batch, added to the report."""
        result = self._config.loss(output, operation.targets[microbatch])
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"one of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise PipelineError(f"the loss function must return a scalar tensor, or (scalar, metrics), not {what}")
        weight = operation.weights[microbatch]
        report = operation.report
        report.loss += loss.item() * weight
        for name, value in metrics.items():
            report.metrics[name] = report.metrics.get(name, 0.0) + _number(value) * weight
        return loss * weight

    def _targets(self, step: int, microbatches: int, given: tuple[Any] | None) -> list[Any]:
        if self._config.last_stage not in self._stages:
            return []
        target = given[0] if given is not None else self._target_from_feeder(step)
        targets = split(target, self._config.microbatches)
        if len(targets) != microbatches:
            raise PipelineError(
                f"step {step}: the input splits into {microbatches} micro-batches, the target into {len(targets)}: "
                "give both the same first dimension"
            )
        return targets

    def _target_from_feeder(self, step: int) -> Any:
        batch = self._batches.get(step)
        if batch is None:
            raise PipelineError(
                f"the feeder gave the first stage a batch for step {step}, and the last stage None: "
                "batch(step) must be a pure function of the step"
            )
        return batch[1]

    def _note(self, action: Action, operation: _Operation, start: float) -> None:
        end = time.monotonic()
        operation.report.busy_s += end - start
        operation.report.spans.append((str(action), start, end))

    def _describe(self, action: Action) -> str:
        stage = self._stages[action.stage]
        layers = f"layers {stage.first_layer} to {stage.first_layer + len(stage.layers) - 1}"
        return f"{_WORDS[action.op]} of micro-batch {action.microbatch}, stage {action.stage} ({layers})"

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Evaluate, then give every module its own mode back (frozen ones may have been in eval mode before)."""
        modules: list[nn.Module] = [m for s in self._stages.values() for layer in s.layers for m in layer.modules()]
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


def _stage(index: int, first: int, sources: Sequence[Any], pipeline: PipelineConfig, worker: WorkerConfig) -> Stage:
    layers = build_layers(sources, first, pipeline.seed)
    return Stage(index, first, layers, pipeline.seed, tie(layers, first, pipeline.tied, worker.owners, pipeline.seed))


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
