"""Transport on one host between GPUs that can read each other's memory; what is on the host passes as in ring.py.

    sender                                              receiver
      copies on its own GPU ── header: handle, event ──►  its stream waits for the event, and copies
      the copy is freed     ◄────────── credit ─────────  the stage asks for it, and waits for the copy

The handle is of CUDA's IPC, as torch.multiprocessing makes it. Where the receiver cannot read the sender's memory (it
has no GPU, sees another one, is the same process), which it says when the channel opens, all passes through the host.
"""

import json
import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lp_pipe.channels import gpu
from lp_pipe.channels.arriving import SIZE, ArrivingInlet
from lp_pipe.channels.mixed import MixedInlet, MixedOutlet
from lp_pipe.channels.packing import CPU, Layout, tensor_over
from lp_pipe.channels.ring import RingInlet, RingOutlet
from lp_pipe.channels.transport import Notify, Outlet, TransferError

_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor: the GPU's number, which the receiver may count otherwise


class IpcOutlet(Outlet):
    """Tokens count the messages. can_send: whether this receiver can be reached so; known before the first credit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        self._held: dict[int, Tensor] = {}  # the receiver copies them until their credits are back
        self.can_send = False

    def on_note(self, note: bytes) -> None:
        process, reachable = json.loads(note)
        self.can_send = process != os.getpid() and gpu.name_of(self._device) in reachable

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        token, size = self._next, layout.offsets[-1]
        self._next += 1
        if not size:
            return token, [SIZE.pack(0)]
        with torch.cuda.device(self._device):
            memory = gpu.memory_on(self._device, size)
            for offset, spec, tensor in zip(layout.offsets, layout.tensor_specs, tensors, strict=False):
                tensor_over(memory, offset, spec).copy_(tensor)
            try:
                _, arguments = reductions.reduce_tensor(memory)  # with an event behind the copies
            except RuntimeError as error:
                raise TransferError(f"the GPU's memory cannot be shared: {error}") from error
        self._held[token] = memory
        return token, [SIZE.pack(size) + pickle.dumps((gpu.name_of(self._device), list(arguments)))]

    def release(self, token: int) -> None:
        self._held.pop(token, None)

    def close(self, reason: str) -> None:
        self._held.clear()


class IpcInlet(ArrivingInlet):
    """device: the CPU where this end has no GPU; then nothing comes this way."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("CUDA IPC", device)
        self._streams: dict[int, torch.cuda.Stream] = {}  # by the sender's GPU
        self._ended: str | None = None

    def begin(self, notify: Notify) -> None:
        reachable = gpu.reachable_from(self._device) if self._device.type == "cuda" else []
        notify(json.dumps([os.getpid(), reachable]).encode())

    def _start(self, token: int, size: int, header: Any) -> "tuple[_Copying, Tensor]":
        name, arguments = pickle.loads(bytes(header)[SIZE.size :])
        arguments[_DEVICE_ARGUMENT] = source = gpu.index_of(name)
        stream = self._streams.setdefault(source, torch.cuda.Stream(device=source))
        with torch.cuda.stream(stream):
            shared = reductions.rebuild_cuda_tensor(*arguments)  # the stream waits for the sender's event
            memory = gpu.memory_on(self._device, size).copy_(shared, non_blocking=True)
            return _Copying(shared, stream, gpu.Queued(stream, lambda: self._ended)), memory

    def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        return gpu.tensors_in(memory, layout)

    def _give_up(self, reason: str) -> None:
        self._ended = reason
        super()._give_up(reason)


class _Copying:
    """A copy of the sender's memory, which is let go once it is made."""

    def __init__(self, shared: Tensor, stream: torch.cuda.Stream, work: gpu.Queued) -> None:
        self._shared: Tensor | None = shared
        self._stream = stream
        self._work = work

    def wait(self, timeout: timedelta, /) -> None:
        self._work.wait(timeout)
        with torch.cuda.stream(self._stream):  # torch waits for the current stream before it tells the sender
            self._shared = None


class CudaIpcOutlet(MixedOutlet):
    def __init__(self, device: torch.device) -> None:
        ipc = IpcOutlet(device)
        super().__init__(RingOutlet(), ipc, lambda: ipc.can_send)


class CudaIpcInlet(MixedInlet):
    def __init__(self, device: torch.device) -> None:
        super().__init__(RingInlet(), IpcInlet(device), device if device.type == "cuda" else CPU)
