"""Whether a checkpoint is of the kind of LR scheduler that is to go on from it."""

from typing import Any

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.saving.same_optimizer import WEIGHTS_ALONE
from lp_pipe.private_torch import schedulers_in


def kind_of(scheduler: Any) -> str:
    """Its class, and those of the schedulers that it consists of: "SequentialLR of LinearLR and ExponentialLR"."""
    inner = schedulers_in(scheduler)
    return type(scheduler).__name__ + (f" of {' and '.join(map(_inner_kind, inner))}" if inner else "")


def refuse_other_scheduler(scheduler: Any, saved: str | None) -> None:
    """saved: `kind_of` the checkpoint's; None: it has none, or was written before kinds were kept.

    By the names of classes alone: the states of some have the same entries (LambdaLR, MultiplicativeLR).

    Raises:
        PipelineError: names both, and says how to take the weights alone.
    """
    own = kind_of(scheduler)
    if saved is not None and saved != own:
        raise PipelineError(
            f"the checkpoint is of another lr_scheduler, {saved}, than this model's, {own}: give the model that one; "
            f"{WEIGHTS_ALONE}"
        )


def _inner_kind(scheduler: Any) -> str:
    kind = kind_of(scheduler)
    return f"({kind})" if " " in kind else kind
