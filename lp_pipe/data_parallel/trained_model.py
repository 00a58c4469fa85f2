"""A model and its optimizers as a part of checkpoints: a torch Distributed Checkpoint to which workers write what they
have.

The entries are those of a pipeline's checkpoint (pipeline/saving/contents.py), so any number of workers can load the
folder, `lp_pipe checkpoint export` reads it, and so does a pipeline whose parameters have the same names.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.checkpoint.folder import read_state, state_file
from lp_pipe.checkpoint.host_visibility import check_is_here
from lp_pipe.data_parallel.optimizer import ReplicaOptimizer
from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.errors import CheckpointError, PipelineError
from lp_pipe.pipeline.saving import METADATA
from lp_pipe.pipeline.saving.contents import ENTRY, Manifest, Saved, entries, joined
from lp_pipe.training.optimizer_state import OfParameter, overrides_state_dict, refuse_hidden_state, values_of_group
from lp_pipe.training.resume_checks import GroupMember, kind_of, refuse_other_groups, refuse_other_optimizer
from lp_pipe.training.share_file import EntryKey, Share, Written, dumped, remove_shares
from lp_pipe.training.tensor_parts import Box, TensorPart, as_part


class SavedBeside:
    """The state of an optimizer, whose place in checkpoints is the folder of its model.

    Checkpoints of lp_pipe before November 2026 have it here.
    """

    def __init__(self, optimizer: ReplicaOptimizer, model: str) -> None:
        self._optimizer = optimizer
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {"saved in": self._model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "param_groups" in state:
            self._optimizer.load_state_dict(state)


class TrainedModel:
    """A model that one worker trains, for checkpoints.

    schedulers: those of the optimizers, for pipelines that load the folder. step: returns the number of finished steps.
    flags: what workers tell each other with a step's sums.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[ReplicaOptimizer],
        schedulers: Sequence[torch.optim.lr_scheduler.LRScheduler],
        workers: ReplicaWorkers,
        step: Callable[[], int],
        flags: Callable[[], list[float]],
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self._schedulers = schedulers
        self._workers = workers
        self._step = step
        self._flags = flags
        self.loaded_from: Path | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether no worker has all of the state, so that each must write and read its own."""
        return any(one.is_sharded for one in self.optimizers) or any(
            isinstance(as_part(value), TensorPart) for value in self.model.parameters()
        )

    def can_hold(self) -> bool:
        """Return whether such a folder can hold the state: dense tensors, and data that belongs to parameters."""
        try:
            for optimizer in self.optimizers:
                refuse_hidden_state(optimizer.inner)
            self._share(copy=False)
        except PipelineError:
            return False
        return not any(overrides_state_dict(optimizer.inner) for optimizer in self.optimizers)

    # ---- saving ----

    def save_async(self, path: Path) -> "Future[list[str]]":
        """Copy the state, and return a future of the files' names; for rank 0.

        Where the state is sharded all workers write, and the future is done: the others call `take_part` meanwhile.
        """
        path.mkdir(parents=True)
        found: Future[list[str]] = Future()
        if self.is_sharded:
            found.set_result(self._save_together(path))
            return found
        share = self._share(copy=True)

        def write() -> None:
            try:
                found.set_result(self._write_alone(path, share))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=write, name="checkpoint of a model").start()
        return found

    def take_part(self) -> None:
        """Write what this worker has into the folder of rank 0; all other workers call this while it saves.

        Raises:
            CheckpointError: a worker cannot write.
        """
        self._save_together(None)

    def _write_alone(self, path: Path, share: Share) -> list[str]:
        from lp_pipe.pipeline.saving.dcp_writing import WholePlan  # 0.7 s

        whole = WholePlan([share.describe()], self._tied())
        written = share.write(str(path), self._version(), 0, self._writer(), whole.left_out[0])
        whole.finish(path, [written])
        return [METADATA, written.file]

    def _save_together(self, path: Path | None) -> list[str]:
        from lp_pipe.pipeline.saving.dcp_writing import WholePlan  # 0.7 s

        rank, share = self._workers.membership.rank, self._share(copy=False)
        folder, version = self._workers.broadcast((str(path), self._version()) if rank == 0 else None, 0)
        whole = WholePlan(self._workers.gathered(share.describe()), self._tied())
        own: Written | str
        try:
            if rank:
                check_is_here(Path(folder), "the worker of rank 0")
            own = share.write(folder, version, rank, self._writer(), whole.left_out[rank])
        except (OSError, CheckpointError) as error:
            own = f"{self._writer()}: {error}"
        written = self._workers.gathered(own)
        if failed := [one for one in written if isinstance(one, str)]:
            remove_shares(Path(folder), version)
            raise CheckpointError(f"cannot save to {folder}: {'; '.join(failed)}")
        if path is not None:
            for one in written:
                if one.places:
                    check_is_here(path / one.file, one.writer)
            whole.finish(path, written)
        return [METADATA, *(one.file for one in written if one.places)]

    def _share(self, *, copy: bool) -> Share:
        saved = self._saved()
        manifest = Manifest(self._step(), self._workers.options.seed)
        return Share({**entries(saved, self._workers.membership.rank), ENTRY: manifest.as_entry()}, copy=copy)

    def _saved(self) -> Saved:
        state = self._scheduler_state()
        optimizer = {name: values for one in self.optimizers for name, values in _state_by_name(one, state).items()}
        kind = kind_of(self._schedulers[0]) if state is not None else None
        return Saved(dict(self._model_state()), optimizer, state, [], {}, {}, kind)

    def _scheduler_state(self) -> dict[str, Any] | None:
        """Return the scheduler's state, if there is one scheduler and its state is data."""
        if len(self._schedulers) != 1 or len(self.optimizers) != 1:
            return None
        state = self._schedulers[0].state_dict()
        try:
            dumped(("lr_scheduler",), state)
        except PipelineError:
            return None
        return state

    def _model_state(self) -> Mapping[str, Any]:
        """Return the model's state; where the model is sharded, that of this worker's parts."""
        sharded = next((one.sharded_model for one in self.optimizers if one.sharded_model is not None), None)
        return self.model.state_dict() if sharded is None else sharded.parts()

    def _tied(self) -> list[list[EntryKey]]:
        """Return the groups of names that the model has for one parameter."""
        names: dict[int, list[EntryKey]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(("model", name))
        return [keys for keys in names.values() if len(keys) > 1]

    def _version(self) -> str:
        return f"step-{self._step()}-{secrets.token_hex(4)}"

    def _writer(self) -> str:
        return f"{self._workers.node.name} on {socket.gethostname()}"

    # ---- loading ----

    def load(self, path: Path) -> None:
        """Read what this worker needs of a folder, whatever workers wrote it.

        Raises:
            CheckpointError: the folder is damaged.
            PipelineError: it is of another model or optimizer.
        """
        if (path.parent / state_file(path.name)).exists():  # from before November 2026
            self.model.load_state_dict(read_state(path.parent, path.name))
            return
        from lp_pipe.pipeline.saving.dcp_reading import SavedFolder  # 0.7 s

        folder, own = SavedFolder(path), self._model_state()
        boxes: dict[EntryKey, tuple[Box, ...]] = {}
        boxes |= {("model", name): part.boxes for name, value in own.items() if (part := _part(value)) is not None}
        owned = {name: parameter for one in self.optimizers for name, parameter in one.named_parameters()}
        for optimizer in self.optimizers:
            if optimizer.is_sharded:
                optimizer.make_buckets(self._workers.exchange, self._flags)
            boxes |= folder.boxes_of_states(
                {
                    name: (tuple(parameter.shape), found)
                    for name, parameter in optimizer.named_parameters()
                    if (found := optimizer.own_boxes(parameter)) is not None
                }
            )
        needed = [key for key in folder.keys if _is_needed(key, own, owned) and boxes.get(key, True)]
        saved = joined(folder.read(needed, boxes))
        for optimizer in self.optimizers:
            _check(optimizer, saved)
        _put_weights(self.model, own, saved.weights)
        for optimizer in self.optimizers:
            optimizer.load_parts(
                {
                    parameter: OfParameter(saved.optimizer[name]["state"], saved.optimizer[name]["options"])
                    for name, parameter in optimizer.named_parameters()
                    if name in saved.optimizer
                }
            )
        self.loaded_from = path


def _state_by_name(optimizer: ReplicaOptimizer, scheduler: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in optimizer.named_parameters()}
    states, groups = optimizer.state_parts(), optimizer.param_groups
    found: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        of_group = {
            "options": _options(group),
            "schedule": values_of_group(scheduler or {}, len(groups), index),
            "group": (type(optimizer.inner).__name__, names[id(group["params"][0])] if group["params"] else ""),
        }
        for parameter in group["params"]:
            found[names[id(parameter)]] = {"state": states.get(parameter, {}), **of_group}
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _is_needed(key: EntryKey, weights: Mapping[str, Tensor], owned: Mapping[str, nn.Parameter]) -> bool:
    match key:
        case ("model", name):
            return name in weights
        case ("optimizer", name, _):
            return name in owned
        case ("options" | "group", _):
            return True
    return False


def _part(value: Any) -> TensorPart | None:
    found = as_part(value) if isinstance(value, Tensor) else None
    return found if isinstance(found, TensorPart) else None


def _check(optimizer: ReplicaOptimizer, saved: Saved) -> None:
    """Refuse the state of another optimizer or of other parameter groups.

    Raises:
        PipelineError: as the functions of resume_checks.
    """
    names = {id(parameter): name for name, parameter in optimizer.named_parameters()}
    grouped = [(group, names[id(parameter)]) for group in optimizer.param_groups for parameter in group["params"]]
    for group, name in grouped:
        if name in saved.optimizer:
            kind, _ = saved.optimizer[name].get("group", (None, ""))
            refuse_other_optimizer(optimizer.inner, group, saved.optimizer[name]["options"], kind)
    refuse_other_groups([GroupMember(name, _options(group), id(group)) for group, name in grouped], saved.optimizer)


@torch.no_grad()
def _put_weights(model: nn.Module, own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    whole = {name: value for name, value in found.items() if not isinstance(value, TensorPart)}
    model.load_state_dict(whole, strict=len(whole) == len(found))
    for name, part in found.items():
        if isinstance(part, TensorPart) and part.values:
            own[name].to_local().copy_(part.values[0])
