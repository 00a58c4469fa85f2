"""Transport on one host between GPUs that can read each other's memory; what is on the host passes as in ring.py.

    sender                                              receiver
      copies into a slot on its own GPU ── its number ──►  the host waits for the slot's event, by asking
      the slot is free              ◄───── credit ──────   its stream copies; the stage asks for that, and waits

A slot is memory and an event, whose handles of CUDA's IPC are sent once, as torch.multiprocessing makes them: to open
and to close them takes long, and torch would open an event for each message and keep it. The receiver's stream never
waits for the event: that of a sender that was killed may never come, and nothing ends such a wait.

Where the receiver cannot read the sender's memory (it has no GPU, sees another one, is the same process), which it says
when the channel opens, all passes through the host.
"""

import json
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lp_pipe.channels import gpu
from lp_pipe.channels.async_receive import SIZE, AsyncReceiver
from lp_pipe.channels.base import Notify, TransferError, TransportSender
from lp_pipe.channels.mixed import MixedReceiver, MixedSender
from lp_pipe.channels.packing import CPU, Layout, tensor_over
from lp_pipe.channels.ring import RingReceiver, RingSender

# Of torch's rebuild_cuda_tensor: the GPU's number, which the receiver may count otherwise; whether its stream waits.
_DEVICE_ARGUMENT, _WAITS_ARGUMENT = 6, -1


@dataclass
class _Slot:
    """The sender's; `memory` grows with the messages. handles: of this memory; b"" when the receiver has them."""

    number: int
    memory: Tensor
    event: Any
    handles: bytes = b""


class _OpenSlot(NamedTuple):
    """The receiver's view of a slot."""

    memory: Tensor
    event: Any


class IpcSender(TransportSender):
    """Tokens count the messages. can_send: whether this receiver can be reached so; known before the first credit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._used: dict[int, _Slot] = {}  # the receiver copies them until their credits are back
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
            slot = self._taken(size)
            for offset, spec, tensor in zip(layout.offsets, layout.tensor_specs, tensors, strict=False):
                tensor_over(slot.memory, offset, spec).copy_(tensor)
            slot.event.record()
        self._used[token] = slot
        handles, slot.handles = slot.handles, b""
        return token, [SIZE.pack(size) + pickle.dumps((slot.number, handles))]

    def release(self, token: int) -> None:
        slot = self._used.pop(token, None)
        if slot is not None:
            self._free.append(slot)

    def close(self, reason: str) -> None:
        had_slots = bool(self._slots)
        for slots in (self._slots, self._free, self._used):
            slots.clear()
        if had_slots:
            torch.cuda.ipc_collect()  # else a file of torch's stays in /dev/shm when the process ends

    def _taken(self, size: int) -> _Slot:
        """One that nobody uses, and large enough."""
        if self._free:
            slot = self._free.pop()
        else:
            event = torch.cuda.Event(interprocess=True)
            slot = _Slot(len(self._slots), gpu.memory_on(self._device, 0), event)
            self._slots.append(slot)
        if slot.memory.numel() < size:
            slot.memory = gpu.memory_on(self._device, size)
            slot.handles = self._handles(slot)
        return slot

    def _handles(self, slot: _Slot) -> bytes:
        try:
            _, arguments = reductions.reduce_tensor(slot.memory)
            return pickle.dumps((gpu.name_of(self._device), list(arguments), slot.event.ipc_handle()))
        except RuntimeError as error:
            raise TransferError(f"the GPU's memory cannot be shared: {error}") from error


class IpcReceiver(AsyncReceiver):
    """device: the CPU where this end has no GPU; then nothing comes this way."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("CUDA IPC", device)
        self._stream: Any = torch.cuda.Stream(device=device) if device.type == "cuda" else None
        self._opened: dict[int, _OpenSlot] = {}  # by the slot's number
        self._ended: str | None = None

    def begin(self, notify: Notify) -> None:
        reachable = gpu.reachable_from(self._device) if self._device.type == "cuda" else []
        notify(json.dumps([os.getpid(), reachable]).encode())

    def _start(self, token: int, size: int, header: Any) -> "tuple[_CopyWork, Tensor]":
        number, handles = pickle.loads(bytes(header)[SIZE.size :])
        # The memory is the stream's own. And torch waits for the current stream when it closes a slot's memory.
        with torch.cuda.stream(self._stream):
            if handles:
                self._opened.pop(number, None)
                self._opened[number] = _opened(handles)
            slot = self._opened.get(number)
            if slot is None:
                raise TransferError("the sender's memory could not be opened, or this end is closed")
            memory = gpu.memory_on(self._device, size)
        return _CopyWork(slot, memory, self._stream, lambda: self._ended), memory

    def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        return gpu.tensors_in(memory, layout)

    def when_received(self, call: Any) -> None:
        def let_go_first() -> None:
            self._let_go()
            call()

        super().when_received(let_go_first)

    def _let_go(self) -> None:
        """No more will come: the sender has its memory back."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._opened.clear()

    def _give_up(self, reason: str) -> None:
        self._ended = reason
        super()._give_up(reason)
        self._let_go()


def _opened(handles: bytes) -> _OpenSlot:
    name, arguments, event = pickle.loads(handles)
    source = gpu.index_of(name)
    arguments[_DEVICE_ARGUMENT], arguments[_WAITS_ARGUMENT] = source, False
    memory = reductions.rebuild_cuda_tensor(*arguments)
    return _OpenSlot(memory, torch.cuda.Event.from_ipc_handle(torch.device("cuda", source), event))


class _CopyWork:
    """A copy of the sender's memory; made by the thread that waits for it, for it waits for the sender first."""

    def __init__(self, slot: _OpenSlot, memory: Tensor, stream: Any, failure: gpu.Failure) -> None:
        self._slot: _OpenSlot | None = slot
        self._memory = memory
        self._stream = stream
        self._failure = failure

    def wait(self, timeout: timedelta, /) -> None:
        slot, self._slot = self._slot, None
        assert slot is not None, "it is waited for once"
        gpu.wait_for(slot.event, self._failure, timeout)
        with torch.cuda.stream(self._stream):
            self._memory.copy_(slot.memory[: len(self._memory)], non_blocking=True)
            copied = gpu.QueuedGpuWork(self._stream, self._failure)
        copied.wait(timeout)


class CudaIpcSender(MixedSender):
    def __init__(self, device: torch.device) -> None:
        ipc = IpcSender(device)
        super().__init__(RingSender(), ipc, lambda: ipc.can_send)


class CudaIpcReceiver(MixedReceiver):
    def __init__(self, device: torch.device) -> None:
        super().__init__(RingReceiver(), IpcReceiver(device), device if device.type == "cuda" else CPU)
