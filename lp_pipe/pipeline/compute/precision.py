"""In which precision layers and the loss compute; parameters stay as they are."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lp_pipe.errors import PipelineError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", *_DTYPES)
_NO_CAST = nullcontext()  # made once, because each call of a layer asks for it


def check_precision(precision: Any) -> None:
    """Refuse unknown names.

    Raises:
        PipelineError: names those that exist.
    """
    if precision not in PRECISIONS:
        raise PipelineError(f"precision={precision!r}: known are {', '.join(PRECISIONS)}")


def autocast(precision: str, device_type: str = "cpu") -> AbstractContextManager[Any]:
    """torch's, around layers and loss. Without its cache, which would outlive a stage's share of the loop."""
    if precision == "fp32":
        return _NO_CAST
    return torch.autocast(device_type, _DTYPES[precision], cache_enabled=False)
