"""What channels need of GPUs: their names, what their streams are doing, tensors in one piece of their memory."""

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
        ValueError: says why not.
    """
    if device.type != "cuda":
        raise ValueError(
            f"channel kind {kind!r} joins two GPUs, and this end is on the {device.type.upper()}: use device='cuda' "
            "for both of its stages, or channel='auto'"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"channel kind {kind!r} needs a GPU, and torch sees none here: use channel='auto'")


def name_of(device: torch.device | int) -> str:
    """The same in all processes, whichever GPUs they see."""
    return str(torch.cuda.get_device_properties(device).uuid)


def index_of(name: str) -> int:
    """The number that the GPU has in this process.

    Raises:
        RuntimeError: this process does not see it.
    """
    for index in range(torch.cuda.device_count()):
        if name_of(index) == name:
            return index
    raise RuntimeError(f"this process does not see GPU {name}")


def reachable_from(device: torch.device) -> list[str]:
    """The names of the GPUs whose memory this one can read; its own is one of them."""
    own = device.index
    others = range(torch.cuda.device_count())
    return [name_of(index) for index in others if index == own or torch.cuda.can_device_access_peer(own, index)]


def memory_on(device: torch.device, size: int) -> Tensor:
    """Memory of the current stream."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def tensors_in(memory: Tensor, layout: Layout) -> list[Tensor]:
    """Those that lie in `memory`, which is complete; each with a storage of its own, for the current stream."""
    memory.record_stream(torch.cuda.current_stream(memory.device))  # it comes from another one's, and goes back there
    places = zip(layout.offsets, layout.tensor_specs, strict=False)  # offsets ends with the size
    with torch.inference_mode(False):
        found = [tensor_over(memory, offset, spec) for offset, spec in places]
        return found if len(found) == 1 else [tensor.clone() for tensor in found]


def wait_for(event: Any, failure: Failure, timeout: timedelta) -> None:
    """Until it has come: looks, and sleeps ever longer in between, because a wait in the driver could not be ended.

    failure: says why it will not come, or was not done rightly; asked again and again.

    Raises:
        RuntimeError: it failed, or the time has passed.
    """
    deadline, delay_s = time.monotonic() + timeout.total_seconds(), _SHORTEST_S
    while not event.query():
        _check(failure)
        if time.monotonic() > deadline:
            raise RuntimeError(f"the GPU was not done within {timeout.total_seconds():g} s")
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, _LONGEST_S)
    _check(failure)


def _check(failure: Failure) -> None:
    reason = failure()
    if reason is not None:
        raise RuntimeError(reason)


class QueuedGpuWork:
    """What a stream has been given to do by now, to be awaited as a Work of torch.distributed is."""

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
