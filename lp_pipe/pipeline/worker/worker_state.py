"""The state of a stage worker: what checkpoints and mirrors keep, and what they bring back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.compute.stage_loss import StageLoss
from lp_pipe.pipeline.layers.model_names import with_formats
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
from lp_pipe.pipeline.worker.restart_check import RestartCheck
from lp_pipe.pipeline.worker.training import Training
from lp_pipe.training.device import to_host
from lp_pipe.training.write_tracker import WriteTracker


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
            weights=self._on_host(),
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

    def get(self, _: GetState) -> dict[str, Tensor]:
        return with_formats(self._on_host(), self._formats())

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
        boxes = folder.boxes_of_states(self.training.own_boxes())
        needed = [key for key in folder.keys if is_of(key, own, parameters) and boxes.get(key, True)]
        saved = joined(folder.read(needed, boxes))
        kept: dict[str, list[str]] = {}
        if command.strict:
            check_shapes(saved.weights, own, f"{command.path} is a checkpoint", self._loadable)
        else:
            kept = {
                "values are not in the checkpoint, and kept as they are": [
                    name for name in own if name not in saved.weights
                ],
                "values have another shape in the checkpoint, and are kept as they are": shape_mismatches(
                    saved.weights, own, self._loadable
                ),
            }
            saved = saved.keeping({name: own[name] for names in kept.values() for name in names})
        fresh = self.training.check(saved)
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
        for stage in self.stages.values():
            stage.load_state_dict(state)
        self.writes.note_loaded()
