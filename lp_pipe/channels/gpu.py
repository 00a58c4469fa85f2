"""Helpers for GPUs: their names, waits for their streams, tensors in one block of their memory."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.packing import Layout, tensor_over

_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3

Failure = Callable[[], str | None]


def check(kind: str, device: torch.device) -> None:
    """Refuse an end that has no GPU.

    Raises:
        ValueError: says why.
    """
    if device.type != "cuda":
        raise ValueError(
            f"channel kind {kind!r} joins two GPUs, and this end is on the {device.type.upper()}: use device='cuda' "
            "for both of its stages, or channel='auto'"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"channel kind {kind!r} needs a GPU, and torch sees none here: use channel='auto'")


def name_of(device: torch.device) -> str:
    """Return the GPU's name, the same in all processes, whichever GPUs they see."""
    return str(torch.cuda.get_device_properties(device).uuid)


def memory_on(device: torch.device, size: int) -> Tensor:
    """Return memory of the current stream."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def tensors_in(memory: Tensor, layout: Layout) -> list[Tensor]:
    """Return the tensors in `memory`, which has arrived, each with a storage of its own, for the current stream."""
    memory.record_stream(torch.cuda.current_stream(memory.device))  # it belongs to another stream, which gets it back
    places = zip(layout.offsets, layout.tensor_specs, strict=False)  # the last offset is the size
    with torch.inference_mode(False):
        found = [tensor_over(memory, offset, spec) for offset, spec in places]
        return found if len(found) == 1 else [tensor.clone() for tensor in found]


def wait_for(event: Any, failure: Failure, timeout: timedelta) -> None:
    """Poll an event until it has come: a wait in the driver could not be ended.

    The sleeps grow with the time that has passed, so that the event is seen about an eighth of that too late.

    failure: returns the reason if the event will not come or its work failed; called again and again.

    Raises:
        RuntimeError: it failed, or the time has passed.
    """
    began = time.monotonic()
    while not event.query():
        _check(failure)
        passed_s = time.monotonic() - began
        if passed_s > timeout.total_seconds():
            raise RuntimeError(f"the GPU did not finish within {timeout.total_seconds():g} s")
        time.sleep(min(max(passed_s / 8, _SHORTEST_S), _LONGEST_S))
    _check(failure)


def _check(failure: Failure) -> None:
    reason = failure()
    if reason is not None:
        raise RuntimeError(reason)


class QueuedGpuWork:
    """The work that a stream has been given so far, to be waited for like torch.distributed's Work."""

    def __init__(self, stream: torch.cuda.Stream, failure: Failure) -> None:
        self._event: Any = torch.cuda.Event()
        self._event.record(stream)
        self._failure = failure

    def wait(self, timeout: timedelta, /) -> None:
        """
        Raises:
            RuntimeError: it failed, or the time has passed.
        """
        wait_for(self._event, self._failure, timeout)
