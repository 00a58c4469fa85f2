"""Whether a checkpoint is of the optimizer that is to go on from it, by the options of a parameter group."""

from collections.abc import Mapping
from typing import Any

import torch

from lp_pipe.errors import PipelineError

# torch's schedulers keep these among an optimizer's own.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})

WEIGHTS_ALONE = (
    "to begin anew with its weights, write them to a file by `lp_pipe checkpoint export`, and give what "
    "safetensors.torch.load_file reads to load_state_dict()"
)


def refuse_other_optimizer(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """saved: the options that the group's parameters have in the checkpoint.

    Another version of torch may have more or fewer options; only another optimizer has some more and some fewer.

    Raises:
        PipelineError: names them, and says how to take the weights alone.
    """
    lacking = sorted({*getattr(optimizer, "defaults", ())} - {*saved})
    unknown = sorted({*saved} - {*group} - _OF_SCHEDULERS)
    if saved and lacking and unknown:
        raise PipelineError(
            f"the checkpoint is of another optimizer than {type(optimizer).__name__}: its options have "
            f"{', '.join(unknown)}, and not {', '.join(lacking)}; {WEIGHTS_ALONE}"
        )
