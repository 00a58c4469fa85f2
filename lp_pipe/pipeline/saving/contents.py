"""The contents of a pipeline's checkpoint as named entries, so that any cut finds what belongs to it.

model.<name>                      a parameter or buffer, under each of its names
formats.<worker>                  the versions of what modules save, if they are not the first
optimizer.<name>.<key>            a parameter's optimizer state
options.<name>                    the options of its group, which the scheduler changes
group.<name>                      the class of its optimizer, and its group's first parameter (identifies it)
schedule.<name>                   what the scheduler's state says of its group
lr_scheduler                      the scheduler's state
lr_scheduler_kind                 its class
loss.<name>                       a buffer of the loss that it has written to
settings.<worker>                 what `apply` has changed of modules beside their tensors, by module
versions.<worker>.newest          of an asynchronous schedule: the number of a worker's newest weights
versions.<worker>.<version>.<name>    and older ones that are still in use
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lp_pipe.errors import CheckpointError
from lp_pipe.pipeline.results import StepResult
from lp_pipe.training.gradients import LossScale
from lp_pipe.training.share_file import EntryKey


class Saved(NamedTuple):
    """The contents of a checkpoint, or of one worker's share.

    optimizer: state and options of every parameter, by name.
    versions: what each worker of an asynchronous pipeline has added.
    loss: buffers by name.
    formats: the versions of the modules that have the weights.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    lr_scheduler: dict[str, Any] | None
    versions: list[dict[str, Any]]
    loss: dict[str, Tensor]
    formats: dict[str, int]
    scheduler_kind: str | None = None
    settings: dict[str, dict[str, Any]] | None = None

    def keeping(self, own: Mapping[str, Tensor]) -> "Saved":
        """Return this with the weights `own` in place of its own, and without optimizer state of them."""
        optimizer = {name: state for name, state in self.optimizer.items() if name not in own}
        return self._replace(weights={**self.weights, **own}, optimizer=optimizer)


def entries(share: Saved, worker: int) -> dict[EntryKey, Any]:
    """Return a worker's share as entries."""
    found: dict[EntryKey, Any] = {("model", name): value for name, value in share.weights.items()}
    if share.formats:
        found["formats", str(worker)] = share.formats
    # One entry for all: reading one for each parameter would take as long again as the weights.
    found["options", str(worker)] = {name: saved["options"] for name, saved in share.optimizer.items()}
    groups = {name: saved["group"] for name, saved in share.optimizer.items() if "group" in saved}
    if groups:
        found["group", str(worker)] = groups
    schedule = {name: saved["schedule"] for name, saved in share.optimizer.items() if saved.get("schedule")}
    if schedule:
        found["schedule", str(worker)] = schedule
    for name, saved in share.optimizer.items():
        found.update({("optimizer", name, key): value for key, value in saved["state"].items()})
    found.update({("loss", name): value for name, value in share.loss.items()})
    if share.lr_scheduler is not None:
        found["lr_scheduler",] = share.lr_scheduler
    if share.scheduler_kind is not None:
        found["lr_scheduler_kind",] = share.scheduler_kind
    if share.settings:
        found["settings", str(worker)] = share.settings
    for versions in share.versions:
        found["versions", str(worker), "newest"] = versions["newest"]
        for version, weights in versions["older"].items():
            found.update({("versions", str(worker), str(version), name): value for name, value in weights.items()})
    return found


def is_of(key: EntryKey, state: Collection[str], parameters: Collection[str]) -> bool:
    """Return whether a worker with such a state_dict, and with these own parameters, needs the entry."""
    match key:
        case ("model", name):
            return name in state
        case ("optimizer", name, _) | ("versions", _, _, name):
            return name in parameters
        case (
            ("lr_scheduler" | "lr_scheduler_kind",)
            | ("loss", _)
            | ("options" | "group" | "schedule" | "formats" | "settings", _)
            | ("versions", _, "newest")
        ):
            return True
    return False


def joined(found: Mapping[EntryKey, Any]) -> Saved:
    """Return the contents from the entries of any number of workers."""
    saved = Saved({}, {}, found.get(("lr_scheduler",)), [], {}, {}, found.get(("lr_scheduler_kind",)))
    settings: dict[str, dict[str, Any]] = {}
    versions: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        match key:
            case ("model", name):
                saved.weights[name] = value
            case ("formats", _):
                saved.formats.update(value)
            case ("loss", name):
                saved.loss[name] = value
            case ("settings", _):
                settings.update(value)
            case ("options" | "group" | "schedule" as kind, _):
                for name, of_group in value.items():
                    _of_parameter(saved, name)[kind] = of_group
            case ("optimizer", name, part):
                _of_parameter(saved, name)["state"][part] = value
            case ("versions", worker, "newest"):
                versions.setdefault(worker, {"older": {}})["newest"] = value
            case ("versions", worker, version, name):
                older = versions.setdefault(worker, {"older": {}})["older"]
                older.setdefault(int(version), {})[name] = value
    saved.versions.extend(versions.values())
    return saved._replace(settings=settings or None)


def _of_parameter(saved: Saved, name: str) -> dict[str, Any]:
    return saved.optimizer.setdefault(name, {"state": {}, "options": {}})


ENTRY = ("lp_pipe",)  # its key among the entries
_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint, or of a mirror, beside the workers' shares.

    step: finished optimizer steps.
    loss_scale: of the next one, if there is one.
    due: results of finished steps that the loop over an asynchronous pipeline had not received yet.
    """

    step: int
    seed: int
    loss_scale: LossScale | None = None
    due: tuple[StepResult, ...] = ()

    def as_entry(self) -> dict[str, Any]:
        """Return the manifest as plain values, which torch.load(weights_only=True) reads."""
        scale = None if self.loss_scale is None else astuple(self.loss_scale)
        return {"format": _FORMAT, **asdict(self), "loss_scale": scale}


def manifest_from(entry: dict[str, Any], where: str) -> Manifest:
    """Return the manifest that `as_entry` has written.

    Raises:
        CheckpointError: another version of lp_pipe wrote it.
    """
    if entry.get("format") != _FORMAT:
        raise CheckpointError(f"{where} has format {entry.get('format')}; this version of lp_pipe reads {_FORMAT}")
    due = tuple(StepResult(**result) for result in entry.get("due", ()))  # older versions have none
    scale = entry["loss_scale"]
    return Manifest(entry["step"], entry["seed"], None if scale is None else LossScale(*scale), due)
