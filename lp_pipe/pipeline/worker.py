"""One stage worker: owns its stages' parameters, and runs its share of a schedule on them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lp_pipe.address import Address
from lp_pipe.channels import ChannelHub
from lp_pipe.channels.kinds import hub_endpoint
from lp_pipe.context import context
from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.activation_meter import ActivationMeter
from lp_pipe.pipeline.batches import BatchSource
from lp_pipe.pipeline.buffers import BufferSnapshot
from lp_pipe.pipeline.build import build_layers
from lp_pipe.pipeline.channel_handle import ChannelTarget
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.device import chosen_device, current, to_device, to_host
from lp_pipe.pipeline.execution import Execution, Operation, Report, Run
from lp_pipe.pipeline.links import Links
from lp_pipe.pipeline.manifest import SHARE
from lp_pipe.pipeline.microbatches import aligned, apart, loss_weights, split
from lp_pipe.pipeline.reduction import Reduction
from lp_pipe.pipeline.results import StageMemory
from lp_pipe.pipeline.schedule import Action, Schedule, forward_on, share
from lp_pipe.pipeline.side_channels import SideChannels
from lp_pipe.pipeline.stage import Stage, check_shapes
from lp_pipe.pipeline.tied import tie
from lp_pipe.pipeline.training import Saved, Training


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
        self._worker, self._replica = pipeline.ranks.places[worker.rank]
        self._device = chosen_device(pipeline.devices[self._worker], worker.rank)
        self._batches = BatchSource(feeder)
        self._name = node.name
        self._stages = {
            stage: _stage(stage, first, sources, pipeline, worker, self._device)
            for stage, (first, sources) in sorted(worker.sources.items())
        }
        self.training = Training(list(self._stages.values()), pipeline.optimizer, pipeline.lr_scheduler)
        self._saved: Saved | None = None
        self._modules = [m for s in self._stages.values() for layer in s.layers for m in layer.modules()]
        self._buffers_before: BufferSnapshot | None = None
        self._meter: ActivationMeter | None = None
        self._gradient_bytes = 0
        ends: Any = pipeline.ranks, worker.rank, self._hub, neighbours
        options: Any = {"kind": pipeline.channel, "name": node.name, "device": self._device}
        self._links = Links(pipeline.channels, *ends, credits=pipeline.credits, **options)
        self._reduction = Reduction(*ends, **options)
        self._side = SideChannels(pipeline.channels, self._links, self._stages)
        self._execution = Execution(pipeline, self._stages, self._links, self._side, node.name, self._device)

    def train(
        self,
        tag: int,
        step: int,
        microbatches: int,
        given: tuple[Any] | None,
        target: tuple[Any] | None = None,
        scale: float | None = None,
    ) -> Report:
        """Run the schedule's actions for one step; gradients stay until `apply` or `discard`.

        given: the batch's input, for the first stage. target: for the last stage. None: ask the feeder. They are split
        here, because memory that was split before it came here would lie at other addresses.
        scale: a factor of the losses, for the backwards; the gradients are without it afterwards.
        """
        schedule = self._config.schedule_for(microbatches)
        self._buffers_before = None
        inputs, targets = self._batch(step, microbatches, given, target)
        operation = self._operation(tag, step, inputs, targets, scale)
        self._buffers_before = BufferSnapshot(self._modules)
        with current(self._device), self._metered(operation) as actions:
            self._execution.run(self._share_of(schedule), operation, actions)
        self._reduction.reduce(tag, self.training.parameters, self._modules, self._buffers_before)
        if scale is not None:
            operation.report.overflowed = self.training.unscale_gradients(scale)
        if self._config.clip_grad_norm is not None:
            operation.report.gradient_norms = self.training.gradient_norms()
        return operation.report

    def infer(self, tag: int, microbatches: int, inputs: dict[int, Any], targets: list[Any]) -> Report:
        """Run forwards in eval mode; the last stage reports the loss, or the outputs where there are no targets.

        inputs: for the first stage, those of this replica, by micro-batch.
        """
        schedule = forward_on(self._config.placement, microbatches)
        self._buffers_before = None  # what a step has changed stays
        operation = self._operation(tag, 0, apart(inputs), aligned(targets))
        with torch.no_grad(), current(self._device), self._eval_mode():
            self._execution.run(self._share_of(schedule), operation, self._execution.inference)
        return operation.report

    def apply(self, total_norm: Tensor | None, skip: bool = False) -> None:
        """Clip by the norm of all stages' gradients, step the optimizer and its scheduler, clear the gradients.

        skip: leave the parameters as they are; only the scheduler goes on.

        Raises:
            Exception: the optimizer's or scheduler's own; other stages may have done the step.
        """
        try:
            self.training.step(total_norm, self._config.clip_grad_norm, skip=skip)
        except Exception as error:
            error.add_note(f"in {self._name}, update of stages {', '.join(map(str, self._stages))}")
            raise

    def has_updated(self) -> bool:
        """Whether the last `apply`, which may have failed, has changed something."""
        return self.training.has_updated

    def on_device(self, tensor: Tensor) -> Tensor:
        """Where this worker's stages compute."""
        return tensor.to(self._device)

    def share_weights(self, tag: int) -> None:
        """Exchange the tied parameters that a step has changed with the other workers."""
        self._buffers_before = None
        self._side.share_weights(tag)

    def discard(self) -> None:
        """Forget what an aborted operation has left behind."""
        self.training.clear_gradients()
        if self._buffers_before is not None:
            self._buffers_before.restore()
            self._buffers_before = None
        self._links.discard()
        self._reduction.discard()
        for stage in self._stages.values():
            stage.discard()

    def abort(self, tag: int, reason: str) -> None:
        """Make operation `tag` fail wherever it waits; called while it runs."""
        self._links.abort(tag, reason)
        self._reduction.abort(tag, reason)

    def start_metering(self) -> None:
        """Count what the next steps hold in memory; they take longer."""
        self._meter = ActivationMeter()

    def stop_metering(self) -> StageMemory:
        """What it was."""
        meter, self._meter = self._meter, None
        assert meter is not None, "stop_metering comes after start_metering"
        parameters, _, state = self.training.bytes()
        buffers = sum(buffer.nbytes for m in self._modules for buffer in m._buffers.values() if buffer is not None)
        sizes = (parameters, self._gradient_bytes, state, buffers, meter.peak_bytes, meter.stash_bytes)
        return StageMemory(self._worker, self._replica, tuple(self._stages), *sizes)

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's part of the model."""
        state = {name: value for stage in self._stages.values() for name, value in stage.state_dict().items()}
        return dict(to_host(state, self._device))

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

    @contextlib.contextmanager
    def _metered(self, operation: Operation) -> Iterator[Mapping[str, Run]]:
        """What to call for the actions of a step."""
        if self._meter is None:
            yield self._execution.training
            return
        meter = self._meter

        def forward(action: Action, operation: Operation) -> None:
            with meter.forward():
                self._execution.training["F"](action, operation)

        own = [
            tensor for module in self._modules for tensor in (*module._parameters.values(), *module._buffers.values())
        ]
        batch = [leaf for leaf in pytree.tree_leaves((operation.inputs, operation.targets)) if isinstance(leaf, Tensor)]
        with meter.counting([*(tensor for tensor in own if tensor is not None), *batch]):
            yield {**self._execution.training, "F": forward}
        self._gradient_bytes = self.training.bytes()[1]

    def _share_of(self, schedule: Schedule) -> tuple[Action, ...]:
        return share(schedule.workers[self._worker], self._config.replicas[self._worker], self._replica)

    def _operation(
        self,
        tag: int,
        step: int,
        inputs: list[Any] | dict[int, Any],
        targets: list[Any],
        scale: float | None = None,
    ) -> Operation:
        weights = loss_weights(targets, self._config.loss_weight) if targets else []
        inputs, targets = to_device(inputs, self._device), to_device(targets, self._device)
        return Operation(tag, step, inputs, targets, weights, Report(), scale)

    def _batch(
        self, step: int, microbatches: int, given: tuple[Any] | None, target: tuple[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """The micro-batches' inputs and targets, as far as this worker's stages need them."""
        needs_input, needs_target = 0 in self._stages, self._config.last_stage in self._stages
        if (needs_input and given is None) or (needs_target and target is None):
            value, label = self._from_feeder(step)
            given, target = given or (value,), target or (label,)
        inputs = split(given[0], self._config.microbatches) if needs_input and given else []
        targets = split(target[0], self._config.microbatches) if needs_target and target else []
        for part, pieces in (("input", inputs), ("target", targets)):
            if pieces and len(pieces) != microbatches:
                raise PipelineError(
                    f"step {step}: the batch's input splits into {microbatches} micro-batches, the {part} that "
                    f"{self._name} got into {len(pieces)}: give both the same first dimension, and let batch(step) be "
                    "a pure function of the step"
                )
        return inputs, targets

    def _from_feeder(self, step: int) -> tuple[Any, Any]:
        batch = self._batches.get(step)
        if batch is None:
            raise PipelineError(
                f"the feeder gave the first stage a batch for step {step}, and {self._name} None: "
                "batch(step) must be a pure function of the step"
            )
        return batch

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Evaluate, then give every module its own mode back (frozen ones may have been in eval mode before).

        And its buffers: some write to them in any mode.
        """
        modes = [module.training for module in self._modules]
        buffers = BufferSnapshot(self._modules)
        for module in self._modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(self._modules, modes, strict=True):
                module.training = mode
            buffers.restore()


def _stage(
    index: int,
    first: int,
    sources: Sequence[Any],
    pipeline: PipelineConfig,
    worker: WorkerConfig,
    device: torch.device,
) -> Stage:
    layers = build_layers(sources, first, pipeline.seed)
    tied = tie(layers, first, pipeline.tied, worker.owners, pipeline.seed)
    return Stage(index, first, layers, pipeline.seed, tied, pipeline.recompute, pipeline.precision, device)
