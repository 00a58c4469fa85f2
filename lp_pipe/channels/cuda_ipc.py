"""A transport on one host between GPUs that can read each other's memory. CPU tensors pass through shared memory.

    sender                                              receiver
                                  ◄───── note ────────  its process, whether it is on a GPU
      a slot with random bytes    ────── note ───────►  opens it on its own GPU, and reads the bytes
                                  ◄───── note ────────  whether they are the sender's
      copies into a slot on its own GPU ── its number ──►  the host polls the slot's event
      the slot is free              ◄───── credit ──────   its stream copies; the stage waits for the copy

A slot is memory and an event. Their handles of CUDA's IPC are sent once, made as by torch.multiprocessing: opening and
closing them takes long, and torch would open an event for each message and keep it. The receiver's stream never waits
for the event: if the sender was killed, it may never come, and nothing ends such a wait.

Only that first slot shows whether it works: MIG, WSL2, expandable segments, cudaMallocAsync and two GPUs without a path
between them cannot do it, and a GPU that CUDA_VISIBLE_DEVICES hides from the receiver can. The first message waits for
the answer. Wherever it does not work, messages go through the host.
"""

import errno
import logging
import os
import pickle
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lp_pipe.channels import gpu
from lp_pipe.channels.async_receive import SIZE, AsyncOperation, AsyncReceiver
from lp_pipe.channels.base import NoRoomError, Notify, TransferError, TransportSender
from lp_pipe.channels.mixed_transport import MixedReceiver, MixedSender
from lp_pipe.channels.packing import CPU, Layout, tensor_over
from lp_pipe.channels.ring import RingReceiver, RingSender
from lp_pipe.errors import Unavailable
from lp_pipe.private_torch import release_ipc_counter

_log = logging.getLogger(__name__)

# Arguments of torch's rebuild_cuda_tensor: the GPU's number, which may differ at the receiver, the counter of the
# memory's uses, and whether its stream waits.
_DEVICE_ARGUMENT, _COUNTER_ARGUMENTS, _WAITS_ARGUMENT = 6, slice(11, 13), -1
_PROBE_BYTES, _PROBE_PATIENCE = 256, timedelta(seconds=10)
_RELEASE_AFTER_S = 1.0  # a receiver that lives has closed its slots by then

_Counter = tuple[bytes, int]  # a file, and a place in it


@dataclass
class _Slot:
    """A slot of the sender.

    memory: grows with the messages. handles: of this memory; b"" once the receiver has them.
    counters: of this memory and former ones that the receiver may still have open.
    """

    number: int
    memory: Tensor
    event: Any
    handles: bytes = b""
    counters: list[_Counter] = field(default_factory=list)


class _OpenSlot(NamedTuple):
    """A slot as the receiver has opened it."""

    memory: Tensor
    event: Any


class _Hello(NamedTuple):
    """The receiver's first note."""

    process: int
    has_gpu: bool


class _Probe(NamedTuple):
    """A slot that the receiver shall try to read, and the bytes in it."""

    number: int
    handles: bytes
    expected: bytes


class _Answer(NamedTuple):
    """The receiver's answer. obstacle: why it cannot read the slot; "" if it can."""

    obstacle: str


class IpcSender(TransportSender):
    """The sending end. Tokens number the messages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._used: dict[int, _Slot] = {}  # the receiver reads them until their credits are back
        self._hello: _Hello | None = None
        self._notify: Notify | None = None
        self._is_readable = False
        self._is_closed = False
        self._closing = threading.Lock()  # a stage may share memory while its channel closes
        self._answered = threading.Event()

    def begin(self, notify: Notify) -> None:
        self._notify = notify
        self._send_probe()

    def on_note(self, note: bytes) -> None:
        said = pickle.loads(note)
        if isinstance(said, _Hello):
            self._hello = said
            self._send_probe()
        elif said.obstacle:
            self._report(said.obstacle)
        else:
            self._free.extend(self._slots)
            self._is_readable = True
            self._report("")

    def can_send(self) -> bool:
        """Return whether the receiver can read this GPU's memory; wait until it has tried."""
        self._answered.wait(2 * _PROBE_PATIENCE.total_seconds())
        return self._is_readable

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        token, size = self._next, layout.offsets[-1]
        if not size:
            self._next += 1
            return token, [SIZE.pack(0)]
        with torch.cuda.device(self._device):
            slot = self._take_slot(size)
            for offset, spec, tensor in zip(layout.offsets, layout.tensor_specs, tensors, strict=False):
                tensor_over(slot.memory, offset, spec).copy_(tensor)
            slot.event.record()
        self._next += 1
        self._used[token] = slot
        handles, slot.handles = slot.handles, b""
        return token, [SIZE.pack(size) + pickle.dumps((slot.number, handles))]

    def release(self, token: int) -> None:
        slot = self._used.pop(token, None)
        if slot is not None:
            del slot.counters[:-1]  # the receiver has closed the memories before the one that it has read
            self._free.append(slot)

    def close(self, reason: str) -> None:
        self._answered.set()
        with self._closing:
            self._is_closed = True
            counters = [counter for slot in self._slots for counter in slot.counters]
            for slots in (self._slots, self._free, self._used):
                slots.clear()
        if counters:
            # A receiver that was killed has not counted down its uses, and torch would keep the memory for ever.
            timer = threading.Timer(_RELEASE_AFTER_S, _release, (counters,))
            timer.name, timer.daemon = "release CUDA IPC", True
            with suppress(RuntimeError):  # out of threads
                timer.start()
            torch.cuda.ipc_collect()  # otherwise a file of torch stays in /dev/shm when the process ends

    def _send_probe(self) -> None:
        hello, notify = self._hello, self._notify
        if hello is None or notify is None:
            return  # the first note may come before `begin`
        if not hello.has_gpu or hello.process == os.getpid():
            self._answered.set()
            return
        expected = secrets.token_bytes(_PROBE_BYTES)
        try:
            with torch.cuda.device(self._device):
                slot = self._new_slot()
                self._grow(slot, _PROBE_BYTES)
                slot.memory.copy_(torch.frombuffer(bytearray(expected), dtype=torch.uint8))
                slot.event.record()
        except (RuntimeError, NoRoomError, TransferError) as error:
            self._report(str(error))
            return
        handles, slot.handles = slot.handles, b""
        with suppress(Unavailable):  # the receiver is gone
            notify(pickle.dumps(_Probe(slot.number, handles, expected)))

    def _report(self, obstacle: str) -> None:
        process = self._hello.process if self._hello is not None else 0
        if obstacle:
            _log.warning("CUDA IPC to process %d fails, tensors go through the host: %s", process, obstacle)
        else:
            _log.info("tensors to process %d stay on GPUs (CUDA IPC)", process)
        self._answered.set()

    def _take_slot(self, size: int) -> _Slot:
        """Return a free slot that is large enough.

        Raises:
            NoRoomError: there is no memory that can be shared; the slot is as before.
            TransferError: the channel was closed meanwhile.
        """
        slot = self._free.pop() if self._free else self._new_slot()
        if slot.memory.numel() < size:
            try:
                self._grow(slot, size)
            except BaseException:
                self._free.append(slot)
                raise
        return slot

    def _new_slot(self) -> _Slot:
        slot = _Slot(len(self._slots), gpu.memory_on(self._device, 0), torch.cuda.Event(interprocess=True))
        with self._closing:
            if not self._is_closed:
                self._slots.append(slot)
        return slot

    def _grow(self, slot: _Slot, size: int) -> None:
        try:
            memory = gpu.memory_on(self._device, size)
            _, arguments = reductions.reduce_tensor(memory)
            handles = pickle.dumps((list(arguments), slot.event.ipc_handle()))
        except RuntimeError as error:
            _log.warning("a message of %d bytes goes through the host: no memory of the GPU to share: %s", size, error)
            raise NoRoomError(errno.ENOMEM, f"no memory of the GPU to share: {error}") from error
        counter = arguments[_COUNTER_ARGUMENTS]
        slot.memory, slot.handles = memory, handles
        with self._closing:
            if not self._is_closed:
                slot.counters.append(counter)
                return
        _release([counter])  # the receiver will not get it
        raise TransferError("the channel is closed")


def _release(counters: list[_Counter]) -> None:
    for file, place in counters:
        release_ipc_counter(file, place)
    torch.cuda.ipc_collect()


class IpcReceiver(AsyncReceiver):
    """The receiving end.

    device: the CPU if this end has no GPU; then nothing arrives this way.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__("CUDA IPC", device)
        self._stream: Any = torch.cuda.Stream(device=device) if device.type == "cuda" else None
        self._opened: dict[int, _OpenSlot] = {}  # by the slot's number
        self._ended: str | None = None
        self._notify: Notify | None = None

    def begin(self, notify: Notify) -> None:
        self._notify = notify
        notify(pickle.dumps(_Hello(os.getpid(), self._device.type == "cuda")))

    def on_note(self, note: bytes) -> None:
        self._waiter.then(lambda: self._answer(pickle.loads(note)))

    def _answer(self, probe: _Probe) -> None:
        assert self._notify is not None, "notes come after `begin`"
        with suppress(Unavailable):  # the sender is gone
            self._notify(pickle.dumps(_Answer(self._obstacle(probe))))

    def _obstacle(self, probe: _Probe) -> str:
        """Return why a slot of the sender cannot be read; "" if it can."""
        try:
            with torch.cuda.stream(self._stream):
                self._opened[probe.number] = slot = _open_slot(probe.handles, self._device)
                memory = gpu.memory_on(self._device, len(probe.expected))
            _CopyWork(slot, memory, self._stream, lambda: self._ended).wait(_PROBE_PATIENCE)
            found = bytes(memory.cpu().tolist())
        except (RuntimeError, OSError) as error:
            return str(error)
        return "" if found == probe.expected else "the receiver reads other bytes than the sender has written"

    def _start(self, token: int, size: int, header: Any) -> tuple[AsyncOperation, Tensor]:
        number, handles = pickle.loads(bytes(header)[SIZE.size :])
        # The memory belongs to this stream. And torch waits for the current stream when it closes a slot's memory.
        with torch.cuda.stream(self._stream):
            if handles:
                self._opened.pop(number, None)
                self._opened[number] = _open_slot(handles, self._device)
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


def _open_slot(handles: bytes, device: torch.device) -> _OpenSlot:
    """Open a slot on the receiver's own GPU: the sender's may be one that this process does not see."""
    arguments, event = pickle.loads(handles)
    arguments[_DEVICE_ARGUMENT], arguments[_WAITS_ARGUMENT] = device.index, False
    memory = reductions.rebuild_cuda_tensor(*arguments)
    return _OpenSlot(memory, torch.cuda.Event.from_ipc_handle(device, event))


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
        super().__init__(RingSender(), ipc, ipc.can_send)


class CudaIpcReceiver(MixedReceiver):
    def __init__(self, device: torch.device) -> None:
        super().__init__(RingReceiver(), IpcReceiver(device), device if device.type == "cuda" else CPU)
