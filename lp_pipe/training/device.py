"""The device and the precision in which a part of a model computes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import pytree

CPU = torch.device("cpu")
Device = str | torch.device


def check_devices(device: Device | Sequence[Device], workers: int, channel: str = "auto") -> tuple[str, ...]:
    """Return the device name of each worker, from the option `device` of `add_pipeline`.

    Raises:
        PipelineError: a name or the number of names is wrong, or this kind of channel does not join these devices.
    """
    given = tuple(device) if isinstance(device, Iterable) and not isinstance(device, str) else (device,) * workers
    names = tuple(str(name) if isinstance(name, torch.device) else name for name in given)
    if len(names) != workers:
        raise PipelineError(f"device={device!r}: give one name, or {workers} of them, one per worker")
    for name in names:
        kind, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
        if not (name in ("auto", "cpu") or (kind == "cuda" and (number.isdecimal() or name == "cuda"))):
            raise PipelineError(f"device={device!r}: {name!r} must be 'auto', 'cpu', 'cuda', 'cuda:0', …")
    if channel == "nccl" and "cpu" in names:
        raise PipelineError(
            f"channel='nccl' with device={device!r}: NCCL carries tensors of GPUs only: use device='cuda', or "
            "channel='auto'"
        )
    return names


def choose_device(name: str, rank: int) -> torch.device:
    """Return the device of a rank's stages, in the rank's own process.

    "auto" takes a GPU if there is one; the ranks take the GPUs in turn. A node that asks for GPUs (`Resources(gpus=1)`)
    sees no others.

    Raises:
        PipelineError: there is no such GPU.
    """
    if name == "cpu":  # without a question to the driver, which would take memory on a GPU
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and not count:
        return CPU
    wanted = int(name.partition(":")[2]) if ":" in name else rank % max(count, 1)
    if wanted >= count:
        raise PipelineError(
            f"device={name!r}: this process sees {count} GPU(s): ask for some with Resources(gpus=…), or use "
            "device='cpu'"
        )
    return torch.device("cuda", wanted)


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make the device current in the body: new CUDA tensors, `layer_rng` and `step_rng` use it.

    The calling thread computes with the node's number of threads from now on.

    Backwards run in the calling thread. By default autograd has one thread for each GPU, which stages that are threads
    would share: one that recomputes there would wait for `step_rng`, which the other holds while a layer of it waits
    for autograd's thread. And what layers keep for a thread would not be there.
    """
    # oneDNN's convolutions ask OpenMP, which has a number for each thread; torch sets it at the thread's first
    # question.
    torch.get_num_threads()
    with torch.autograd.set_multithreading_enabled(False):
        if device.type != "cuda":
            yield
            return
        torch.cuda.init()  # before that a GPU has no generator that could be seeded
        with torch.cuda.device(device):
            yield


def has_own_memory(device: torch.device) -> bool:
    """Return whether the device's tensors are not in the host's memory."""
    return device.type != "cpu"


def to_device(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors on a device; the value itself if that is the CPU."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value) if device.type != "cpu" else value


def to_host(value: Any, device: torch.device) -> Any:
    """Return the value, which a stage on `device` has made, with its tensors in the host's memory."""
    return on_host(value) if device.type != "cpu" else value


def on_host(value: Any) -> Any:
    """Return the value with its tensors in the host's memory; those that are there are not copied."""
    return pytree.tree_map_only(Tensor, Tensor.cpu, value)


def empty_on_host(like: Tensor) -> Tensor:
    """Return memory of the host for a tensor's values: page-locked, so that a GPU copies them by itself."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let torch compute with so many threads in the body, as a stage does.

    With another number, kernels sum in another order.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", *_DTYPES)
_NO_CAST = nullcontext()  # made once, because each call of a layer uses it


def check_precision(precision: Any) -> None:
    """Refuse unknown names of a precision.

    Raises:
        PipelineError: the error lists the known ones.
    """
    if precision not in PRECISIONS:
        raise PipelineError(f"precision={precision!r}: give one of {', '.join(PRECISIONS)}")


def autocast(precision: str, device_type: str = "cpu") -> AbstractContextManager[Any]:
    """Return torch.autocast for layers and loss, without its cache, which would outlive a stage's share of the loop."""
    if precision == "fp32":
        return _NO_CAST
    return torch.autocast(device_type, _DTYPES[precision], cache_enabled=False)
