"""A stage worker: has its stages' parameters, and runs its share of a schedule on them."""

import contextlib
import gc
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from lp_pipe.address import Address
from lp_pipe.context import context
from lp_pipe.errors import NotSupported, noting
from lp_pipe.pipeline.compute.stage import EVALUATION, stages_of
from lp_pipe.pipeline.compute.stage_loss import StageLoss
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.microbatches import aligned
from lp_pipe.pipeline.layers.model_checks import refuse_time_first
from lp_pipe.pipeline.layers.model_names import names_by_index
from lp_pipe.pipeline.layers.named_layers import eval_mode
from lp_pipe.pipeline.protocol import (
    Abort,
    Apply,
    ChangeModules,
    CommandService,
    ConfirmEnd,
    Discard,
    GetInfo,
    GetSettings,
    GetUpdateProgress,
    Handlers,
    Infer,
    Ping,
    Reconnect,
    Report,
    RestoreSettings,
    SearchNonFinite,
    ShareTiedWeights,
    StartMetering,
    StepTask,
    StopMetering,
    Train,
    TrainAsync,
    UpdateProgress,
    WorkerInfo,
)
from lp_pipe.pipeline.schedule import Action, Schedule, forward_on, share
from lp_pipe.pipeline.worker.async_worker import AsyncWorker, Lookahead, NoLookahead
from lp_pipe.pipeline.worker.channel_handle import ChannelTarget
from lp_pipe.pipeline.worker.execution import Execution, Hook, Operation, RunAction, hooked
from lp_pipe.pipeline.worker.links import Links
from lp_pipe.pipeline.worker.metering import Metering
from lp_pipe.pipeline.worker.microbatch_source import MicrobatchSource
from lp_pipe.pipeline.worker.mirror_store import MirrorStore
from lp_pipe.pipeline.worker.module_settings import ModuleSettings, with_loss
from lp_pipe.pipeline.worker.neighbours import Neighbours, own_hub
from lp_pipe.pipeline.worker.nonfinite import NonFiniteSearch, UpdateGuard
from lp_pipe.pipeline.worker.parameter_shards import BlockShards, EarlyShards, ParameterShards
from lp_pipe.pipeline.worker.reduction import Reduction
from lp_pipe.pipeline.worker.restart_check import RestartCheck
from lp_pipe.pipeline.worker.rules import StepRules, copied_parameters
from lp_pipe.pipeline.worker.shares import Shares
from lp_pipe.pipeline.worker.side_channels import SideChannels
from lp_pipe.pipeline.worker.training import Training
from lp_pipe.pipeline.worker.worker_state import WorkerState
from lp_pipe.private_torch import buffers_of, parameters_of, version_of
from lp_pipe.training.buffer_snapshot import BufferPlace
from lp_pipe.training.device import choose_device, current, has_own_memory, to_host
from lp_pipe.training.lasting_memory import keep_no_holes, lasting
from lp_pipe.training.memory_advice import advice_for_pipeline, advised
from lp_pipe.training.rng import change_place, step_rng
from lp_pipe.training.write_tracker import WriteTracker


class StageWorker(CommandService):
    """Does the commands of its conductor, one operation at a time. What each command means is said in `protocol`.

    A node of its own serves it; the first worker is inside the conductor, and is served by the conductor's node.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        worker: WorkerConfig,
        channels: Address,
        neighbours: Mapping[int, ChannelTarget],
        feeder: Any = None,
    ) -> None:
        super().__init__()
        node = context()
        self._config = pipeline
        self._worker, self._replica = pipeline.ranks.places[worker.rank]
        if pipeline.channel == "nccl":  # loading a kernel late waits for kernels that wait for another stage
            os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        self.device = choose_device(pipeline.devices[self._worker], worker.rank)
        self._name = node.name
        self._advice = advice_for_pipeline(pipeline.zero, max(pipeline.replicas), pipeline.workers)
        count = pipeline.replicas[self._worker]
        early = EarlyShards(self._replica, count, self.device)
        if pipeline.zero == 3 and count > 1:
            keep_no_holes()
        keeps = lasting() if pipeline.zero and count > 1 else contextlib.nullcontext()
        with advised(self._advice), current(self.device), keeps:
            on_built = early.take if pipeline.zero == 3 and count > 1 else lambda _: None
            self._stages = stages_of(worker, pipeline, self.device, owns_sources=node.owns_arguments, on_built=on_built)
            self._shards = self._parameter_shards(early)
        if not pipeline.has_batch_dims:
            for stage in self._stages.values():
                refuse_time_first(stage.layers, stage.first_layer)
        stages = list(self._stages.values())
        self.training = Training(
            stages,
            pipeline.optimizer,
            pipeline.lr_scheduler,
            pipeline.seed,
            self._shards,
            is_offloaded=self._is_offloaded,
        )
        loss = StageLoss(pipeline.loss if pipeline.last_stage in self._stages else None, self.device)
        self._criterion = loss.call
        self._inner = [module for stage in self._stages.values() for module in stage.modules()]
        self._modules = [*self._inner, *loss.modules]
        self._settings = ModuleSettings(
            with_loss((item for stage in self._stages.values() for item in stage.named_modules()), loss.call)
        )
        self._writes = self._write_tracker()
        self._rules = StepRules(pipeline, self._stages, pipeline.replicas[self._worker])
        self._metering = Metering(self._inner, self.training, (self._worker, self._replica), list(self._stages))
        self._search = NonFiniteSearch(pipeline, self._stages, names_by_index(worker.sources.values()), node.name)
        self._microbatch_source = MicrobatchSource(pipeline, self._stages, feeder, node.name, self.device)
        self._restart_check = RestartCheck(node.name)
        self._state = WorkerState(
            self._stages,
            self.training,
            loss,
            self._settings,
            self._writes,
            self._microbatch_source,
            self._restart_check,
            self.device,
            self._shards if isinstance(self._shards, BlockShards) and pipeline.zero == 3 else None,
            self._joined,
        )
        mirrors = MirrorStore(worker.rank, self._state.snapshot, self._state.restore)
        shares = Shares(
            worker.rank if pipeline.zero else self._worker,
            self._state.snapshot,
            f"{node.name} on {socket.gethostname()}",
        )
        for part in (self._restart_check, self._state, mirrors, shares):
            self._add_handlers(part.handlers())
        self._add_own_handlers()
        # After its layers are built: if that fails, the neighbours are told why, and do not find a closed hub.
        hub = own_hub(pipeline.channel, channels)
        self._connect(
            Neighbours(pipeline.ranks, worker.rank, node.name, hub, neighbours, pipeline.channel, self.device)
        )

    def _add_handlers(self, handlers: Handlers) -> None:
        super()._add_handlers({kind: self._with_advice(handle) for kind, handle in handlers.items()})

    def _with_advice(self, handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def do(command: Any) -> Any:
            with advised(self._advice):
                return handle(command)

        return do

    def _add_own_handlers(self) -> None:
        self._add_handlers(
            dict(
                [
                    Ping.by(self.ping),
                    GetInfo.by(self.get_info),
                    Reconnect.by(self.reconnect),
                    Train.by(self.train),
                    SearchNonFinite.by(self.search_non_finite),
                    TrainAsync.by(self.train_async),
                    Infer.by(self.infer),
                    Apply.by(self.apply),
                    GetUpdateProgress.by(self.get_update_progress),
                    ShareTiedWeights.by(self.share_tied_weights),
                    ConfirmEnd.by(self.confirm_end),
                    Discard.by(self.discard),
                    Abort.by(self.abort),
                    StartMetering.by(self.start_metering),
                    StopMetering.by(lambda _: self._metering.stop()),
                    ChangeModules.by(self.change_modules),
                    GetSettings.by(lambda _: self._settings.changed()),
                    RestoreSettings.by(self.restore_settings),
                ]
            )
        )

    def ping(self, _: Ping) -> None:
        """Return at once: that the worker answers is the reply."""

    def get_info(self, _: GetInfo) -> WorkerInfo:
        return WorkerInfo(self._name, socket.gethostname(), tuple(self._stages))

    def reconnect(self, command: Reconnect) -> None:
        self._restart_check.rejoin()
        self._microbatch_source.drop_prefetched()
        self._discard(0)
        for ends in (self._links, self._reduction):
            ends.close("a worker was restarted")
        self._connect(replace(self._neighbours, epoch=command.epoch))
        gc.collect()  # the closed ends, in cycles with their connections, keep more memory than the collector knows of

    def train(self, command: Train) -> Report:
        task, scale = command.task, command.scale
        self._restart_check.note_change()
        if self._config.callbacks:
            self._apply_callbacks(task.step)
        with self._joined(task.tag):
            if self._shards is not None and self._shards.zero == 1:
                self._reduction.share_gradients(self.training.parameters)
            operation = self._run(task, scale, self._hooks())
            self._metering.before_update()
            parameters = [] if isinstance(self._shards, BlockShards) else self.training.parameters
            self._reduction.reduce(task.tag, parameters, self._modules, self._writes.buffers_before)
            self.training.examine(operation.report, self._config, scale)
        return operation.report

    def search_non_finite(self, command: SearchNonFinite) -> Report:
        with self._joined(command.task.tag):
            report = self._run(command.task, command.scale, (self._search,), sums=False).report
        report.nonfinite = self._search.found
        return report

    def train_async(self, command: TrainAsync) -> Report:
        assert isinstance(self._lookahead, AsyncWorker), "only an asynchronous schedule has such steps"
        self._restart_check.note_change()
        self._writes.forget()  # a failed asynchronous step is not undone
        with current(self.device):
            return self._lookahead.run(command.task, command.following, command.after, self._hooks())

    def infer(self, command: Infer) -> Report:
        schedule = forward_on(self._config.placement, command.microbatches)
        self._lookahead.discard()  # its messages are in the channels in front of these
        inputs, targets = aligned(command.inputs), aligned(command.targets)
        operation = self._microbatch_source.of(command.tag, EVALUATION, inputs, targets)
        hooks = (self._rules,) if self._rules.are_due(trains=False) else ()
        with (
            torch.no_grad(),
            current(self.device),
            eval_mode(self._inner),
            self._writes.undone(command.tag),
            hooked(self._execution.inference, hooks) as doing,
            self._joined(command.tag),
        ):
            self._run_part(schedule, operation, doing)
        operation.report_losses()
        return operation.report

    def apply(self, command: Apply) -> None:
        self._restart_check.note_change()
        self._lookahead.discard()  # of a step that is left out, some forwards may be done
        stages = ", ".join(map(str, self._stages))
        doing = noting(f"in {self._name}, update of stages {stages}, step {command.step}")
        with doing, current(self.device), self._joined(command.tag):
            self.training.step(command.step, command.total_norm, self._config.clip_grad_norm, skip=command.skip)
        self._writes.forget()

    def get_update_progress(self, _: GetUpdateProgress) -> tuple[str, UpdateProgress]:
        return self._name, self.training.update_progress

    def share_tied_weights(self, command: ShareTiedWeights) -> None:
        self._side.share_weights(command.tag)

    def confirm_end(self, command: ConfirmEnd) -> None:
        self._microbatch_source.confirm_end(command.step)

    def discard(self, command: Discard) -> None:
        self._discard(command.tag)

    def abort(self, command: Abort) -> None:
        for waiting in (self._links, self._reduction, self._lookahead):
            waiting.abort(command.tag, command.reason)

    def start_metering(self, _: StartMetering) -> None:
        self._lookahead.discard()  # forwards that were done ahead have not been measured
        self._metering.start()

    def change_modules(self, command: ChangeModules) -> Any:
        if self._config.zero == 3:
            raise NotSupported("apply() with zero=3: the modules' parameters are in shards: use zero=2")
        self._restart_check.note_change()
        self._lookahead.discard()
        self._versions_before = self._tensor_versions()
        with current(self.device), self._rng_of_change(command.step):
            result = self._settings.apply(command.change)
        self._note_changed_modules()
        return to_host(result, self.device)

    def restore_settings(self, command: RestoreSettings) -> bool:
        self._settings.restore(command.settings)
        return self._tensor_versions() != self._versions_before

    def _apply_callbacks(self, step: int) -> None:
        with (
            noting(f"in {self._name}, a callback of the model before step {step}"),
            current(self.device),
            self._rng_of_change(step),
        ):
            if self._settings.apply_due(self._config.callbacks, step):
                self._note_changed_modules()

    def _note_changed_modules(self) -> None:
        self.training.note_changed_parameters()
        self._writes.note_loaded()
        self._rules.note_change()

    def _rng_of_change(self, step: int) -> AbstractContextManager[None]:
        """Seed random numbers that a user's function draws before step `step`."""
        first = min((stage.first_layer for stage in self._stages.values()), default=0)
        return step_rng(self._config.seed, first, step, change_place(first))

    def _tensor_versions(self) -> list[int]:
        states = [(*parameters_of(module).values(), *buffers_of(module).values()) for module in self._modules]
        return [version_of(tensor) for state in states for tensor in state if tensor is not None]

    def _hooks(self) -> tuple[Hook, ...]:
        """Return the hooks of the next step; usually there are none."""
        metering = (self._metering,) if self._metering.is_on else ()
        return (*metering, self._rules) if self._rules.are_due(trains=True) else metering

    def _write_tracker(self) -> WriteTracker:
        if self._config.zero == 3 and self._shards is not None:  # writes to parameters are refused by the shards
            return WriteTracker(self._inner, (), self._modules)
        named = {id(parameter): (name, parameter) for name, parameter in self.training.named_parameters.items()}
        refused: dict[str | BufferPlace, str] = {}
        for name, parameter, why in copied_parameters(self._config, self._stages):
            known, _ = named.setdefault(id(parameter), (name, parameter))  # not known: a borrowed one
            refused.setdefault(known, why)
        return WriteTracker(self._inner, named.values(), self._modules, refused=refused)

    def _run(self, task: StepTask, scale: float | None, hooks: tuple[Hook, ...], *, sums: bool = True) -> Operation:
        """Run the forwards and backwards of a step. sums: add up gradients that replicas divide."""
        schedule = self._config.schedule_for(task.microbatches)
        operation = self._microbatch_source.operation(task, scale)
        self._writes.begin(task.tag, trains=True)
        with current(self.device), hooked(self._execution.training, hooks) as doing:
            self._run_part(schedule, operation, doing, sums=sums)
        self._writes.end(trains=True)
        operation.report_losses()
        return operation

    def _discard(self, tag: int) -> None:
        self.training.clear_gradients()
        if isinstance(self._shards, BlockShards):
            self._shards.discard()
        self._writes.undo(tag)
        self._links.discard()
        self._reduction.discard()
        for stage in self._stages.values():
            stage.discard()
        self._lookahead.discard()

    def _connect(self, neighbours: Neighbours) -> None:
        config = self._config
        self._neighbours = neighbours
        self._links = Links(config.channels, neighbours, config.credits)
        self._reduction = Reduction(neighbours)
        self._side = SideChannels(config.channels, self._links, self._stages)
        self._execution = Execution(
            config, self._stages, self._links, self._side, self._name, self.device, self._criterion
        )
        self._lookahead: Lookahead = self._async_worker() if config.is_asynchronous else NoLookahead()
        self._state.lookahead = self._lookahead

    @property
    def _is_offloaded(self) -> bool:
        return self._config.is_offloaded and has_own_memory(self.device)

    def _parameter_shards(self, early: EarlyShards) -> ParameterShards | None:
        count = self._config.replicas[self._worker]
        named = [item for stage in self._stages.values() for item in stage.named_parameters()]
        if not self._config.zero or count == 1:
            return ParameterShards(named, 0, 1, 0) if self._is_offloaded else None
        if self._config.zero == 1:
            return ParameterShards(named, self._replica, count, 1)
        (stage,) = self._stages.values()
        blocks = stage.divide_into_blocks()
        stage.memory = BlockShards(named, self._replica, count, self._config.zero, blocks, early.found)
        return stage.memory

    @contextlib.contextmanager
    def _joined(self, tag: int) -> Iterator[None]:
        """Join the other replicas for what they divide, in operation `tag`."""
        if self._shards is None or not self._shards.zero:
            yield
            return
        with self._reduction.joined(tag) as self._shards.backend:
            yield

    def _async_worker(self) -> AsyncWorker:
        share = self._replica, self._config.replicas[self._worker]
        parts = self._execution, self.training, self._reduction, self._microbatch_source
        stage = self._stages[self._worker]
        guard = UpdateGuard(stage, self.training, self._search, self._config) if self._config.on_nan == "stop" else None
        return AsyncWorker(self._name, stage, self._config.timings, share, *parts, self._metering, guard)

    def _run_part(
        self, schedule: Schedule, operation: Operation, doing: Mapping[str, RunAction], *, sums: bool = False
    ) -> None:
        """Run this replica's share of the schedule."""
        shards = self._shards
        if not isinstance(shards, BlockShards):
            self._execution.run(self._part_of(schedule), operation, doing)
            return
        # Replica 0 has as many micro-batches as any. One that has fewer makes the collectives of the missing ones.
        pattern = share(schedule.workers[self._worker], self._config.replicas[self._worker], 0)
        last = max((number for number, action in enumerate(pattern) if action.op == "B"), default=-1)
        for number, action in enumerate(pattern):
            own = action._replace(microbatch=action.microbatch + self._replica)
            is_there = own.microbatch < schedule.microbatches
            if action.op == "B":
                with shards.backward(sums=sums and number == last):
                    if is_there:
                        self._execution.run([own], operation, doing)
            elif is_there:
                self._execution.run([own], operation, doing)
            else:
                shards.pass_by()

    def _part_of(self, schedule: Schedule) -> tuple[Action, ...]:
        return share(schedule.workers[self._worker], self._config.replicas[self._worker], self._replica)
