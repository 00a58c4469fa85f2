"""A transport on one host between GPUs that can read each other's memory. CPU tensors pass through shared memory.

    sender                                              receiver
      copies into a slot on its own GPU ── its number ──►  the host polls the slot's event
      the slot is free              ◄───── credit ──────   its stream copies; the stage waits for the copy

A slot is memory and an event. Their handles of CUDA's IPC are sent once, made as by torch.multiprocessing: opening and
closing them takes long, and torch would open an event for each message and keep it. The receiver's stream never waits
for the event: if the sender was killed, it may never come, and nothing ends such a wait.

All tensors pass through the host if the receiver cannot read the sender's memory, which it says when the channel opens:
it has no GPU, sees another one, or is the same process.
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
from lp_pipe.channels.mixed_transport import MixedReceiver, MixedSender
from lp_pipe.channels.packing import CPU, Layout, tensor_over
from lp_pipe.channels.ring import RingReceiver, RingSender

# Arguments of torch's rebuild_cuda_tensor: the GPU's number, which may differ at the receiver, and whether its stream
# waits.
_DEVICE_ARGUMENT, _WAITS_ARGUMENT = 6, -1


@dataclass
class _Slot:
    """A slot of the sender.

    memory: grows with the messages. handles: of this memory; b"" once the receiver has them.
    """

    number: int
    memory: Tensor
    event: Any
    handles: bytes = b""


class _OpenSlot(NamedTuple):
    """A slot as the receiver has opened it."""

    memory: Tensor
    event: Any


class IpcSender(TransportSender):
    """The sending end. Tokens number the messages.

    can_send: whether the receiver can read this GPU's memory; known before the first credit.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._used: dict[int, _Slot] = {}  # the receiver reads them until their credits are back
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
            slot = self._take_slot(size)
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
            torch.cuda.ipc_collect()  # otherwise a file of torch stays in /dev/shm when the process ends

    def _take_slot(self, size: int) -> _Slot:
        """Return a free slot that is large enough."""
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
    """The receiving end.

    device: the CPU if this end has no GPU; then nothing arrives this way.
    """

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
        # The memory belongs to this stream. And torch waits for the current stream when it closes a slot's memory.
        with torch.cuda.stream(self._stream):
            if handles:
                self._opened.pop(number, None)
                self._opened[number] = _open_slot(handles)
            slot = self._opened.get(number)
            if slot is None:
                raise TransferError("the sender's memory could not be opened, or this end is closed")
            memory = gpu.memory_on(self._device, size)
        return _CopyWork(slot, memory, self._stream, lambda: self._ended), memory

    def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        return gpu.tensors_in(memory, layout)

    def when_received(self, call: Any) -> None:
        def close_slots_first() -> None:
            self._close_slots()
            call()

        super().when_received(close_slots_first)

    def _close_slots(self) -> None:
        """Close the sender's slots: no more messages arrive, and the sender has its memory back."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._opened.clear()

    def _give_up(self, reason: str) -> None:
        self._ended = reason
        super()._give_up(reason)
        self._close_slots()


def _open_slot(handles: bytes) -> _OpenSlot:
    name, arguments, event = pickle.loads(handles)
    source = gpu.index_of(name)
    arguments[_DEVICE_ARGUMENT], arguments[_WAITS_ARGUMENT] = source, False
    memory = reductions.rebuild_cuda_tensor(*arguments)
    return _OpenSlot(memory, torch.cuda.Event.from_ipc_handle(torch.device("cuda", source), event))


class _CopyWork:
    """A copy of the sender's memory; the thread that waits for it starts it, once the sender's event has come."""

    def __init__(self, slot: _OpenSlot, memory: Tensor, stream: Any, failure: gpu.Failure) -> None:
        self._slot: _OpenSlot | None = slot
        self._memory = memory
        self._stream = stream
        self._failure = failure

    def wait(self, timeout: timedelta, /) -> None:
        slot, self._slot = self._slot, None
        assert slot is not None, "an operation is waited for once"
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
