"""The checks of `lp_pipe doctor --gpu`: what GPUs there are, and how tensors would travel between their processes.

The channels are real ones, to a second process that sends back what it gets.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.channels import ChannelHub, libnccl, open_sender
from lp_pipe.errors import ChannelClosed, Unavailable

_GIB = 1 << 30
_PATIENCE_S = 60.0  # NCCL takes seconds to connect
_ROUNDS = 8
_NUMBERS = 4 << 20  # of 8 bytes: a message of 32 MiB
_PEER = "from sys import argv\nfrom lp_pipe.cli.gpu_checks import answer\nanswer(*argv[1:])"

Result = Sequence[str]


class Carried(NamedTuple):
    """The way that tensors have travelled to another process and back."""

    stays_on_gpu: bool
    gib_per_s: float


def checks() -> dict[str, Callable[[], Result]]:
    """Return the checks by name; only the first one where there is no GPU."""
    found: dict[str, Callable[[], Result]] = {"gpus": check_gpus}
    if torch.cuda.is_available():
        found |= {"peer access": check_peer_access, "cuda ipc": check_ipc, "nccl": check_nccl}
    return found


def check_gpus() -> Result:
    if not torch.cuda.is_available():
        fix = "nvidia-smi && pip install --force-reinstall torch    (a build for this driver's CUDA)"
        return "fail", f"torch {torch.__version__} sees no GPU here", fix
    return "ok", "; ".join(_described(index) for index in range(torch.cuda.device_count()))


def check_peer_access() -> Result:
    """Check which GPUs read each other's memory without the host; CUDA IPC between two GPUs needs it."""
    count = torch.cuda.device_count()
    if count == 1:
        return "ok", "one GPU"
    pairs = [(one, other) for one in range(count) for other in range(one)]
    without = [f"{other} and {one}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    if without:
        fix = "nvidia-smi topo -p2p r    (NVLink or one PCIe switch; a virtual machine may hide it)"
        return "warn", f"none between GPUs {', '.join(without)}: their tensors go through the host", fix
    return "ok", f"between all {count} GPUs"


def check_ipc() -> Result:
    """Send through the channel that `channel="auto"` is between two processes of this host."""
    device, peer = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
    carried = _to_second_process("auto", device, peer)
    what = f"cuda:0 to {peer} in another process: {carried.gib_per_s:.1f} GiB/s"
    if not carried.stays_on_gpu:
        fix = "unset PYTORCH_CUDA_ALLOC_CONF    (expandable segments; MIG and WSL2 cannot)"
        return "warn", f"channel='auto' goes through the host, {what}", fix
    return "ok", f"channel='auto' stays on GPUs, {what}"


def check_nccl() -> Result:
    """Send through `channel="nccl"`, on one GPU if there is no other."""
    missing = libnccl.why_missing()
    if missing is not None:
        return "warn", f"channel='nccl' cannot be used: {missing}", "pip install torch    (its CUDA builds have NCCL)"
    version = ".".join(map(str, libnccl.version()))
    device, peer = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
    try:
        carried = _to_second_process("nccl", device, peer)
    except (ChannelClosed, Unavailable) as error:
        return "warn", f"NCCL {version}: {error}", "NCCL_DEBUG=INFO lp_pipe doctor --gpu"
    return "ok", f"NCCL {version}, cuda:0 to {peer} in another process: {carried.gib_per_s:.1f} GiB/s"


def carry(folder: str, kind: str, device: torch.device, sent: Tensor) -> Carried:
    """Send a tensor to the process that runs `answer` with the same folder and kind; check what comes back.

    Raises:
        ChannelClosed, Unavailable: the other process has ended, or the channel cannot be made.
        RuntimeError: other numbers came back.
    """
    hub = ChannelHub(_endpoint(folder, "back"), "doctor")
    receiver = hub.receiver("back", device=device)
    sender = _opened(folder, "there", kind, device)
    try:
        began = 0.0
        for number in range(_ROUNDS + 1):
            if number == 1:  # the first message opens the way
                began = time.monotonic()
            sender.send(0, sent)
            if not torch.equal(receiver.receive(0, _PATIENCE_S), sent):
                raise RuntimeError(f"channel={kind!r}: message {number} came back with other numbers")
        took_s = time.monotonic() - began
        return Carried(sender.keeps_on_gpu, 2 * _ROUNDS * sent.nbytes / took_s / _GIB)
    finally:
        sender.close("done")
        hub.close("done")


def answer(folder: str, kind: str, device_name: str) -> None:
    """Send back what comes from `carry` until it closes."""
    device = torch.device(device_name)
    hub = ChannelHub(_endpoint(folder, "there"), "doctor's second process")
    receiver = hub.receiver("there", device=device)
    sender = _opened(folder, "back", kind, device)
    try:
        while True:
            sender.send(0, receiver.receive(0))
    except ChannelClosed:
        sender.close("done")


def _to_second_process(kind: str, device: torch.device, peer: torch.device) -> Carried:
    with tempfile.TemporaryDirectory(prefix="lp") as folder:
        process = subprocess.Popen([sys.executable, "-c", _PEER, folder, kind, str(peer)])
        try:
            return carry(folder, kind, device, torch.arange(_NUMBERS, dtype=torch.float64, device=device))
        finally:
            process.kill()
            process.wait()


def _opened(folder: str, channel: str, kind: str, device: torch.device) -> Any:
    """Open a sender to the other process's hub, once that listens."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while not Path(folder, channel).exists() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return open_sender(_endpoint(folder, channel), channel, kind=kind, name="doctor", device=device)


def _endpoint(folder: str, channel: str) -> str:
    return f"unix:{folder}/{channel}"


def _described(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {found.name}, {found.total_memory / _GIB:.0f} GiB, capability {found.major}.{found.minor}"
