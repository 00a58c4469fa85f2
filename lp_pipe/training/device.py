"""The device and the precision in which a part of a model computes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.packing import copied
from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import pytree

CPU = torch.device("cpu")
Device = str | torch.device


def check_devices(device: Device | Sequence[Device], workers: int, channel: str = "auto") -> tuple[str, ...]:
    """One name for each worker, from the option of `add_pipeline`.

    Raises:
        PipelineError: a name is wrong, or their number; or this kind of channel does not join them.
    """
    given = tuple(device) if isinstance(device, Iterable) and not isinstance(device, str) else (device,) * workers
    names = tuple(str(name) if isinstance(name, torch.device) else name for name in given)
    if len(names) != workers:
        raise PipelineError(f"device={device!r}: give one name, or {workers} of them, one per worker")
    for name in names:
        kind, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
        if not (name in ("auto", "cpu") or (kind == "cuda" and (number.isdecimal() or name == "cuda"))):
            raise PipelineError(f"device={device!r}: {name!r} is none of 'auto', 'cpu', 'cuda', 'cuda:0', …")
    if channel == "nccl" and "cpu" in names:
        raise PipelineError(
            f"channel='nccl' with device={device!r}: NCCL carries tensors of GPUs only: use device='cuda', or "
            "channel='auto'"
        )
    return names


def chosen_device(name: str, rank: int) -> torch.device:
    """The device of a rank's stages, in its own process. "auto": a GPU where there is one; ranks take turns.

    A node that asks for GPUs (`Resources(gpus=1)`) sees no others.

    Raises:
        PipelineError: there is no such GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return CPU
    wanted = int(name.partition(":")[2]) if ":" in name else rank % max(count, 1)
    if wanted >= count:
        raise PipelineError(
            f"device={name!r}: this process sees {count} GPU(s): ask for some with Resources(gpus=…), or use "
            "device='cpu'"
        )
    return torch.device("cuda", wanted)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """In the body new CUDA tensors, and `step_rng`, are of this device.

    The thread that asks computes with as many threads as the node was given, from now on.
    """
    # oneDNN's convolutions ask OpenMP, whose number is one for each thread: torch sets it when it is first asked there.
    torch.get_num_threads()
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(value: Any, device: torch.device) -> Any:
    """A value with its tensors on a device; itself where that changes nothing."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value) if device.type != "cpu" else value


def to_host(value: Any, device: torch.device) -> Any:
    """A value that a stage on `device` has made, with its tensors in the host's memory."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), value) if device.type != "cpu" else value


def copied_on(value: Any, device: torch.device) -> Any:
    """What a stage of the same process would receive: the same tensors in memory of their own."""
    if device.type == "cpu":
        return copied(value)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """In the body torch computes with so many threads, as a stage does: with others, kernels sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
