"""One stage worker: owns its stages' parameters, and runs its share of a schedule on them."""

import gc
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lp_pipe.address import Address
from lp_pipe.context import context
from lp_pipe.errors import noting
from lp_pipe.pipeline.compute.stage import EVALUATION, stages_of
from lp_pipe.pipeline.compute.stage_loss import StageLoss
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.microbatches import aligned
from lp_pipe.pipeline.layers.model_checks import refuse_time_first
from lp_pipe.pipeline.layers.model_names import names_by_index, with_formats
from lp_pipe.pipeline.layers.named_layers import eval_mode
from lp_pipe.pipeline.layers.state_shapes import accepted_by_modules, check_shapes, shape_mismatches
from lp_pipe.pipeline.results import NonFinite, StageMemory
from lp_pipe.pipeline.saving.contents import Saved, is_of, joined
from lp_pipe.pipeline.schedule import Action, Schedule, forward_on, share
from lp_pipe.pipeline.worker.async_worker import AsyncWorker, Lookahead
from lp_pipe.pipeline.worker.channel_handle import ChannelTarget
from lp_pipe.pipeline.worker.execution import Execution, Operation, Report, RunAction
from lp_pipe.pipeline.worker.learning_rate import LearningRate
from lp_pipe.pipeline.worker.links import Links
from lp_pipe.pipeline.worker.metering import Metering
from lp_pipe.pipeline.worker.microbatch_source import MicrobatchSource
from lp_pipe.pipeline.worker.mirror_store import MirrorStore
from lp_pipe.pipeline.worker.module_settings import Change, ModuleSettings, Settings, with_loss
from lp_pipe.pipeline.worker.neighbours import Neighbours, own_hub
from lp_pipe.pipeline.worker.nonfinite import NonFiniteSearch
from lp_pipe.pipeline.worker.reduction import Reduction
from lp_pipe.pipeline.worker.restart_check import RestartCheck
from lp_pipe.pipeline.worker.shares import Shares
from lp_pipe.pipeline.worker.side_channels import SideChannels
from lp_pipe.pipeline.worker.tasks import StepTask
from lp_pipe.pipeline.worker.training import Training, Update
from lp_pipe.pipeline.worker.update_guard import UpdateGuard
from lp_pipe.pipeline.worker.worker_info import WorkerInfo
from lp_pipe.private_torch import buffers_of, parameters_of, version_of
from lp_pipe.training.device import choose_device, current, to_host
from lp_pipe.training.forward_writes import ForwardWrites
from lp_pipe.training.rng import change_place, step_rng


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
        self._config = pipeline
        self._worker, self._replica = pipeline.ranks.places[worker.rank]
        self._device = choose_device(pipeline.devices[self._worker], worker.rank)
        self._name = node.name
        self._stages = stages_of(worker, pipeline, self._device, owns_sources=node.owns_arguments)
        if not pipeline.has_batch_dims:
            for stage in self._stages.values():
                refuse_time_first(stage.layers, stage.first_layer)
        self.training = Training(list(self._stages.values()), pipeline.optimizer, pipeline.lr_scheduler, pipeline.seed)
        self._saved: Saved | None = None
        self._restart_check = RestartCheck(node.name)
        self.join, self.is_as_built = self._restart_check.join, self._restart_check.is_as_built
        rate = LearningRate(self.training, self._restart_check)
        self.scheduler_kind, self.step_scheduler = rate.scheduler_kind, rate.step_scheduler
        self.learning_rates = rate.learning_rates
        mirrors = MirrorStore(worker.rank, self._share, self._take)
        self.guarded_by, self.forget_mirrors = mirrors.guarded_by, mirrors.forget_mirrors
        self.mirror, self.go_back = mirrors.mirror, mirrors.go_back
        self.keep_mirror, self.mirror_of = mirrors.keep_mirror, mirrors.mirror_of
        self.mirrors_held, self.settle_mirrors = mirrors.mirrors_held, mirrors.settle_mirrors
        shares = Shares(self._worker, self._share, f"{node.name} on {socket.gethostname()}")
        self.hold_share, self.plan_share = shares.hold_share, shares.plan_share
        self.write_share, self.forget_share = shares.write_share, shares.forget_share
        self.remove_share = shares.remove_share
        self._loss = StageLoss(pipeline.loss if pipeline.last_stage in self._stages else None, self._device)
        self._inner = [module for stage in self._stages.values() for module in stage.modules()]
        self._modules = [*self._inner, *self._loss.modules]
        self._settings = ModuleSettings(
            with_loss((item for stage in self._stages.values() for item in stage.named_modules()), self._loss.call)
        )
        self._writes = ForwardWrites(self._inner, self.training.named_parameters.items(), self._modules)
        self._metering = Metering(self._inner, self.training, (self._worker, self._replica), list(self._stages))
        self._search = NonFiniteSearch(pipeline, self._stages, names_by_index(worker.sources.values()), node.name)
        self._microbatch_source = MicrobatchSource(pipeline, self._stages, feeder, node.name, self._device)
        # Not before its layers are built: where that fails, the neighbours are told why, and find no closed hub.
        hub = own_hub(pipeline.channel, channels)
        self._connect(
            Neighbours(pipeline.ranks, worker.rank, node.name, hub, neighbours, pipeline.channel, self._device)
        )

    def whereabouts(self) -> WorkerInfo:
        """Where it runs, and what."""
        return WorkerInfo(self._name, socket.gethostname(), tuple(self._stages))

    def is_up(self) -> bool:
        """Whether it answers, after a restart."""
        return True

    def reconnect(self, epoch: str) -> None:
        """New channels to all neighbours, one of which was restarted; the same `epoch` for all workers."""
        self._restart_check.rejoin()
        self._microbatch_source.drop_prefetched()
        self.discard(0)
        for ends in (self._links, self._reduction):
            ends.close("a worker was restarted")
        self._connect(replace(self._neighbours, epoch=epoch))
        gc.collect()  # the closed ends, in cycles with their connections, keep more memory than the collector knows of

    def train(self, task: StepTask, scale: float | None = None) -> Report:
        """Run the schedule's actions for one step; gradients stay until `apply` or `discard`.

        scale: a factor of the losses, for the backwards; the gradients are without it afterwards.
        """
        self._restart_check.note_change()
        if self._config.callbacks:
            self._apply_callbacks(task.step)
        operation = self._run(task, scale, self._metering.around(self._execution.training))
        self._metering.before_update()
        self._reduction.reduce(task.tag, self.training.parameters, self._modules, self._writes.buffers_before)
        self.training.examine(operation.report, self._config, scale)
        return operation.report

    def search(self, task: StepTask, scale: float | None = None) -> Report:
        """As `train`, to see where something is not finite; `discard` what it has done."""
        found: list[NonFinite] = []
        report = self._run(task, scale, self._search.around(self._execution.training, found)).report
        report.nonfinite = found
        return report

    def train_ahead(self, task: StepTask, ahead: StepTask | None, after: int) -> Report:
        """One step of an asynchronous schedule, updates included; see AsyncWorker.run."""
        assert isinstance(self._lookahead, AsyncWorker), "only an asynchronous schedule has such steps"
        self._restart_check.note_change()
        self._writes.forget()  # a step that fails is not undone
        with current(self._device):
            return self._lookahead.run(task, ahead, after)

    def infer(self, tag: int, microbatches: int, inputs: dict[int, Any], targets: list[Any]) -> Report:
        """Run forwards in eval mode; the last stage reports the loss, or the outputs where there are no targets.

        inputs: for the first stage, those of this replica, by micro-batch.
        """
        schedule = forward_on(self._config.placement, microbatches)
        self._lookahead.discard()  # its messages are in the way of these
        operation = self._microbatch_source.of(tag, EVALUATION, aligned(inputs), aligned(targets))
        with torch.no_grad(), current(self._device), eval_mode(self._inner), self._writes.undone(tag):
            self._execution.run(self._part_of(schedule), operation, self._execution.inference)
        return operation.report

    def apply(self, step: int, total_norm: Tensor | None, skip: bool = False) -> None:
        """Clip by the norm of all stages' gradients, step the optimizer and its scheduler, clear the gradients.

        skip: leave the parameters as they are; only the scheduler goes on.

        Raises:
            Exception: the optimizer's or scheduler's own; other stages may have done the step.
        """
        self._restart_check.note_change()
        self._lookahead.discard()  # a step that is left out, perhaps the one of which some forwards are done
        with noting(f"in {self._name}, update of stages {', '.join(map(str, self._stages))}, step {step}"):
            self.training.step(step, total_norm, self._config.clip_grad_norm, skip=skip)
        self._writes.forget()

    def confirm_end(self, step: int) -> None:
        """The feeder has told the first stage that there is no such step; see BatchSource."""
        self._microbatch_source.confirm_end(step)

    def apply_to_modules(self, change: Change, step: int) -> Any:
        """Call a user's function with this worker's modules; returns what it returns.

        Raises:
            Exception: the function's own; `has_changed_tensors` says whether it has changed any before.
        """
        self._restart_check.note_change()
        self._lookahead.discard()
        self._versions_before = self._tensor_versions()
        first = min((stage.first_layer for stage in self._stages.values()), default=0)
        with current(self._device), step_rng(self._config.seed, first, step, change_place(first)):
            result = self._settings.apply(change)
        self._writes.note_loaded()
        return to_host(result, self._device)

    def _apply_callbacks(self, step: int) -> None:
        first = min((stage.first_layer for stage in self._stages.values()), default=0)
        with (
            noting(f"in {self._name}, a callback of the model before step {step}"),
            current(self._device),
            step_rng(self._config.seed, first, step, change_place(first)),
        ):
            if self._settings.apply_due(self._config.callbacks, step):
                self._writes.note_loaded()

    def undo_settings(self, settings: Settings) -> bool:
        """Set what `apply_to_modules` has changed beside tensors back; returns whether it has changed tensors."""
        self._settings.restore(settings)
        return self._tensor_versions() != self._versions_before

    def settings(self) -> Settings:
        """Return what `apply_to_modules` has changed beside tensors, since the layers were built."""
        return self._settings.changed()

    def _tensor_versions(self) -> list[int]:
        states = [(*parameters_of(module).values(), *buffers_of(module).values()) for module in self._modules]
        return [version_of(tensor) for state in states for tensor in state if tensor is not None]

    def last_update(self) -> tuple[str, Update]:
        """Return this worker's name, and what it has done of the last `apply`, which may have failed."""
        return self._name, self.training.last_update

    @property
    def device(self) -> torch.device:
        """Where this worker's stages compute."""
        return self._device

    def share_weights(self, tag: int) -> None:
        """Exchange the tied parameters that a step has changed with the other workers."""
        self._side.share_weights(tag)

    def discard(self, tag: int) -> None:
        """Forget what the aborted operation `tag` has left behind; it may have failed before it came to this worker."""
        self.training.clear_gradients()
        self._writes.undo(tag)
        self._links.discard()
        self._reduction.discard()
        for stage in self._stages.values():
            stage.discard()
        self._lookahead.discard()

    def abort(self, tag: int, reason: str) -> None:
        """Make operation `tag` fail wherever it waits; called while it runs."""
        self._links.abort(tag, reason)
        self._reduction.abort(tag, reason)
        self._lookahead.abort(tag, reason)

    def start_metering(self) -> None:
        """Count what the next steps hold in memory; they take longer."""
        self._lookahead.discard()  # of forwards that were done ahead nobody has counted anything
        self._metering.start()

    def stop_metering(self) -> StageMemory:
        """What it was."""
        return self._metering.stop()

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's part of the model."""
        self._restart_check.check_joined()
        with self._lookahead.between_steps():
            return dict(to_host(self._own_state(), self._device))

    def names(self) -> list[str]:
        """Those in its state_dict."""
        return list(self._own_state())

    def taken(self, state: dict[str, Tensor]) -> set[str]:
        """Which of these, that have other shapes than here, `load_state_dict` would take even so."""
        return accepted_by_modules([named for stage in self._stages.values() for named in stage.named_layers()], state)

    def formats(self) -> dict[str, int]:
        """The versions of what its modules save, as far as they are not the first."""
        return {name: version for stage in self._stages.values() for name, version in stage.formats().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this worker's part of a whole model's; optimizer state stays."""
        self._restart_check.note_change()
        self._lookahead.forget_versions()
        for stage in self._stages.values():
            stage.load_state_dict(state)
        self._writes.note_loaded()

    def read(self, path: str, strict: bool) -> dict[str, list[str]]:
        """Read what belongs to this worker's layers, and change nothing before `adopt`: the other workers may fail to.

        strict: the checkpoint must have all of this worker's names, in the same shapes.
        Returns the names of what does not begin with the checkpoint's values, by the reason.

        Raises:
            CheckpointError: a file is missing or damaged.
            PipelineError: it is of another model.
        """
        from lp_pipe.pipeline.saving.dcp_reading import SavedFolder

        own, parameters = self._own_state(), self.training.named_parameters
        folder = SavedFolder(Path(path))
        saved = joined(folder.read(key for key in folder.keys if is_of(key, own, parameters)))
        kept: dict[str, list[str]] = {}
        if strict:
            check_shapes(saved.weights, own, f"{path} is a checkpoint", self.taken)
        else:
            kept = {
                "values are not in the checkpoint, and kept as they are": [
                    name for name in own if name not in saved.weights
                ],
                "values have another shape in the checkpoint, and are kept as they are": shape_mismatches(
                    saved.weights, own, self.taken
                ),
            }
            saved = saved.keeping({name: own[name] for names in kept.values() for name in names})
        fresh = self.training.check(saved)
        kept["parameters were not trained in the checkpoint, and begin with fresh optimizer state"] = fresh
        self._saved = saved
        return {reason: names for reason, names in kept.items() if names}

    def adopt(self) -> None:
        """Go on from what was read."""
        saved, self._saved = self._saved, None
        assert saved is not None, "adopt comes after read"
        self._take(saved)

    def _run(
        self, task: StepTask, scale: float | None, actions: AbstractContextManager[Mapping[str, RunAction]]
    ) -> Operation:
        """The forwards and backwards of a step."""
        schedule = self._config.schedule_for(task.microbatches)
        operation = self._microbatch_source.operation(task, scale)
        self._writes.begin(task.tag, trains=True)
        with current(self._device), actions as doing:
            self._execution.run(self._part_of(schedule), operation, doing)
        self._writes.end(trains=True)
        return operation

    def _own_state(self) -> dict[str, Tensor]:
        return {name: value for stage in self._stages.values() for name, value in stage.state_dict().items()}

    def _take(self, saved: Saved) -> None:
        self._microbatch_source.drop_prefetched()
        self.load_state_dict(with_formats(saved.weights, saved.formats))
        self.training.restore(saved)
        self._loss.restore(saved.loss)
        self._settings.restore(saved.settings or {})
        self._lookahead.restore(saved.versions)

    def _share(self) -> Saved:
        """On the host: who guards this worker may see no GPU, and this one's may have no room for copies."""
        self._writes.check()
        share = self.training.share(self.state_dict(), self.formats(), self._loss.state(), self._lookahead.versions())
        return Saved(*to_host(share, self._device))._replace(settings=self._settings.changed())

    def _connect(self, neighbours: Neighbours) -> None:
        config = self._config
        self._neighbours = neighbours
        self._links = Links(config.channels, neighbours, config.credits)
        self._reduction = Reduction(neighbours)
        self._side = SideChannels(config.channels, self._links, self._stages)
        self._execution = Execution(
            config, self._stages, self._links, self._side, self._name, self._device, self._loss.call
        )
        self._lookahead = self._async_worker() if config.is_asynchronous else Lookahead()

    def _async_worker(self) -> AsyncWorker:
        share = self._replica, self._config.replicas[self._worker]
        parts = self._execution, self.training, self._reduction, self._microbatch_source
        stage = self._stages[self._worker]
        guard = UpdateGuard(stage, self.training, self._search, self._config) if self._config.on_nan == "stop" else None
        return AsyncWorker(self._name, stage, self._config.timings, share, *parts, self._metering, guard)

    def _part_of(self, schedule: Schedule) -> tuple[Action, ...]:
        return share(schedule.workers[self._worker], self._config.replicas[self._worker], self._replica)
