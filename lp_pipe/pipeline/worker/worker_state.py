"""The state of a stage worker: what checkpoints and mirrors keep, and what they bring back."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.compute.stage_loss import StageLoss
from lp_pipe.pipeline.layers.model_names import formats_of, with_formats
from lp_pipe.pipeline.layers.state_shapes import accepted_by_modules, check_shapes, shape_mismatches
from lp_pipe.pipeline.protocol import (
    AdoptCheckpoint,
    FindLoadable,
    GetLearningRates,
    GetSchedulerKind,
    GetState,
    GetStateNames,
    Handlers,
    LoadState,
    ReadCheckpoint,
    SchedulerKind,
    StepScheduler,
)
from lp_pipe.pipeline.saving.contents import Saved, is_of, joined
from lp_pipe.pipeline.worker.async_worker import Lookahead, NoLookahead
from lp_pipe.pipeline.worker.microbatch_source import MicrobatchSource
from lp_pipe.pipeline.worker.module_settings import ModuleSettings
from lp_pipe.pipeline.worker.parameter_shards import BlockShards
from lp_pipe.pipeline.worker.restart_check import RestartCheck
from lp_pipe.pipeline.worker.training import Training
from lp_pipe.training.device import to_host
from lp_pipe.training.share_file import EntryKey
from lp_pipe.training.tensor_parts import Box, TensorPart, boxes_of_range, memory_order
from lp_pipe.training.write_tracker import WriteTracker

if TYPE_CHECKING:  # 0.7 s
    from lp_pipe.pipeline.saving.dcp_reading import SavedFolder


@dataclass(eq=False)
class WorkerState:
    """Parameters, buffers, optimizer, scheduler, settings of modules, and an asynchronous schedule's older weights.

    `snapshot` and `restore` are what checkpoints and mirrors are made of.
    lookahead: the worker sets a new one whenever it connects its channels.
    """

    stages: Mapping[int, Stage]
    training: Training
    loss: StageLoss
    settings: ModuleSettings
    writes: WriteTracker
    microbatch_source: MicrobatchSource
    restart_check: RestartCheck
    device: torch.device
    shards: BlockShards | None  # of parameters, which are whole only while layers use them
    joined: Callable[[int], AbstractContextManager[None]]  # with the other replicas, for an operation
    lookahead: Lookahead = field(default_factory=NoLookahead)
    _read: Saved | None = None  # by ReadCheckpoint, for AdoptCheckpoint

    def handlers(self) -> Handlers:
        return dict(
            [
                GetState.by(self.get),
                GetStateNames.by(self.names),
                FindLoadable.by(self.loadable),
                LoadState.by(self.load),
                ReadCheckpoint.by(self.read_checkpoint),
                AdoptCheckpoint.by(self.adopt_checkpoint),
                GetSchedulerKind.by(self.scheduler_kind),
                StepScheduler.by(self.step_scheduler),
                GetLearningRates.by(self.learning_rates),
            ]
        )

    def snapshot(self) -> Saved:
        """Return the state, not copied, on the host: the worker that guards this one may see no GPU."""
        self.writes.check()
        saved = Saved(
            weights=self._on_host() if self.shards is None else self._own_parts(self.shards),
            optimizer=self.training.optimizer_state(),
            lr_scheduler=self.training.scheduler_state(),
            versions=self.lookahead.versions(),
            loss=self.loss.state(),
            formats=self._formats(),
            scheduler_kind=self.training.scheduler_kind(),
        )
        return Saved(*to_host(saved, self.device))._replace(settings=self.settings.changed())

    def restore(self, saved: Saved) -> None:
        """Go on from a state that `snapshot` returned, here or on workers with other stages."""
        self.microbatch_source.drop_prefetched()
        self._load(with_formats(saved.weights, saved.formats))
        self.training.restore(saved)
        self.loss.restore(saved.loss)
        self.settings.restore(saved.settings or {})
        self.lookahead.restore(saved.versions)

    def get(self, command: GetState) -> dict[str, Tensor]:
        if self.shards is None:
            return with_formats(self._on_host(), self._formats())
        with self.joined(command.tag), self.shards.whole(gathers=True):
            return with_formats({name: value.clone() for name, value in self._on_host().items()}, self._formats())

    def names(self, _: GetStateNames) -> list[str]:
        return list(self._own())

    def loadable(self, command: FindLoadable) -> set[str]:
        return self._loadable(command.state)

    def load(self, command: LoadState) -> None:
        self._load(command.state)

    def read_checkpoint(self, command: ReadCheckpoint) -> dict[str, list[str]]:
        from lp_pipe.pipeline.saving.dcp_reading import SavedFolder

        own, parameters = self._own(), self.training.named_parameters
        folder = SavedFolder(Path(command.path))
        boxes = {**folder.boxes_of_states(self.training.own_boxes()), **self._boxes_of_weights(folder)}
        needed = [
            key for key in folder.keys if is_of(key, own, parameters) and (boxes.get(key, True) or key[0] == "model")
        ]
        saved = joined(folder.read(needed, boxes))
        kept: dict[str, list[str]] = {}
        if command.strict:
            check_shapes(_outlined(saved.weights), own, f"{command.path} is a checkpoint", self._loadable)
        else:
            kept = {
                "values are not in the checkpoint, and kept as they are": [
                    name for name in own if name not in saved.weights
                ],
                "values have another shape in the checkpoint, and are kept as they are": shape_mismatches(
                    _outlined(saved.weights), own, self._loadable
                ),
            }
            saved = saved.keeping({name: own[name] for names in kept.values() for name in names})
        fresh = self.training.check(saved._replace(weights=_outlined(saved.weights)))
        kept["parameters were not trained in the checkpoint, and begin with fresh optimizer state"] = fresh
        self._read = saved
        return {reason: names for reason, names in kept.items() if names}

    def adopt_checkpoint(self, _: AdoptCheckpoint) -> None:
        saved, self._read = self._read, None
        assert saved is not None, "AdoptCheckpoint comes after ReadCheckpoint"
        self.restore(saved)

    def scheduler_kind(self, _: GetSchedulerKind) -> SchedulerKind | None:
        kind = self.training.scheduler_kind()
        return SchedulerKind(kind, self.training.waits_for_metric) if kind is not None else None

    def step_scheduler(self, command: StepScheduler) -> None:
        self.restart_check.check_joined()  # no channel is used that would tell of a restart
        self.restart_check.note_change()
        self.training.step_scheduler_by(command.metric)

    def learning_rates(self, _: GetLearningRates) -> dict[str, float]:
        self.restart_check.check_joined()
        return self.training.learning_rates()

    def _boxes_of_weights(self, folder: "SavedFolder") -> dict[EntryKey, tuple[Box, ...]]:
        """Return which boxes of the saved parameters this replica needs, if it has shards of them."""
        if self.shards is None:
            return {}
        own = {}
        for name, parameter in self._named_parameters().items():
            shape = tuple(parameter.shape)
            own[name] = shape, boxes_of_range(shape, *self.shards.range_of(parameter), memory_order(parameter))
        return folder.boxes_of_states(own, "model")

    def _own(self) -> dict[str, Tensor]:
        return {name: value for stage in self.stages.values() for name, value in stage.state_dict().items()}

    def _on_host(self) -> dict[str, Tensor]:
        self.restart_check.check_joined()
        with self.lookahead.between_steps():
            return dict(to_host(self._own(), self.device))

    def _formats(self) -> dict[str, int]:
        return {name: version for stage in self.stages.values() for name, version in stage.formats().items()}

    def _loadable(self, state: dict[str, Tensor]) -> set[str]:
        return accepted_by_modules([named for stage in self.stages.values() for named in stage.named_layers()], state)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        self.restart_check.note_change()
        self.lookahead.forget_versions()
        if self.shards is None:
            for stage in self.stages.values():
                stage.load_state_dict(state)
        else:
            self._load_shards(self.shards, state)
        self.writes.note_loaded()

    def _load_shards(self, shards: BlockShards, state: Mapping[str, Any]) -> None:
        """Load whole tensors, and parts of parameters that are this replica's."""
        own, parts = self._own(), {name: value for name, value in state.items() if isinstance(value, TensorPart)}
        # A part's parameter is loaded from itself: modules take all of their state or none.
        whole = with_formats({**state, **{name: own[name] for name in parts}}, formats_of(state))
        with shards.whole(gathers=False):
            for stage in self.stages.values():
                stage.load_state_dict(whole)
        parameters = self._named_parameters()
        for name, part in parts.items():
            shards.set_part(parameters[name], part)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters under all of their names."""
        return {
            prefix + name: parameter
            for stage in self.stages.values()
            for prefix, layer in stage.named_layers()
            for name, parameter in layer.named_parameters(remove_duplicate=False)
        }

    def _own_parts(self, shards: BlockShards) -> dict[str, Any]:
        """Return the state with parts in place of parameters."""
        self.restart_check.check_joined()
        parts, parameters = shards.parts(), self._named_parameters()
        return {name: parts[parameters[name]] if name in parameters else value for name, value in self._own().items()}


def _outlined(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors, with ones that have a shape and a dtype, and no elements, in place of parts."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, TensorPart) else value
        for name, value in weights.items()
    }
