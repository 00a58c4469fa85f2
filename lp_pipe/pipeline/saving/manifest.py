"""What a checkpoint, or a mirror, says of itself, beside the workers' shares."""

from dataclasses import asdict, astuple, dataclass
from typing import Any

from lp_pipe.errors import CheckpointError
from lp_pipe.pipeline.compute.loss_scale import LossScale
from lp_pipe.pipeline.results import StepResult

ENTRY = ("lp_pipe",)  # where it is among the entries
_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """step: finished optimizer steps. loss_scale: of the next one, where there is one.

    due: results of finished steps that whoever loops over an asynchronous pipeline had not had yet.
    """

    step: int
    seed: int
    loss_scale: LossScale | None = None
    due: tuple[StepResult, ...] = ()

    def as_entry(self) -> dict[str, Any]:
        """Of plain values, which torch.load(weights_only=True) reads."""
        scale = None if self.loss_scale is None else astuple(self.loss_scale)
        return {"format": _FORMAT, **asdict(self), "loss_scale": scale}


def from_entry(entry: dict[str, Any], where: str) -> Manifest:
    """Undo `as_entry`.

    Raises:
        CheckpointError: another version of lp_pipe wrote it.
    """
    if entry.get("format") != _FORMAT:
        raise CheckpointError(f"{where} has format {entry.get('format')}; this version of lp_pipe reads {_FORMAT}")
    due = tuple(StepResult(**result) for result in entry.get("due", ()))  # older versions have none
    scale = entry["loss_scale"]
    return Manifest(entry["step"], entry["seed"], None if scale is None else LossScale(*scale), due)
