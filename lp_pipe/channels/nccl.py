"""NCCL between a channel's two ranks, for tensors on GPUs; CPU tensors pass through the connection, as in stream.py.

    sender (rank 0)                                     receiver (rank 1)
      its GPU, the communicator's id ── notes ────────►
                               ◄─────── notes ────────  its GPU
      copies on the stage's stream ── header: token, size ─►
      its thread: copied, "ready" ──── note ──────────►  its thread: receives
      its thread: sends        ──────── NCCL ─────────►

One message at a time is on its way, and a receive is queued only when the bytes it waits for are about to be sent. A
send or receive that waits on the GPU holds up what comes behind it in the same hardware queue, so that two stages that
queued several messages to each other would wait for each other for ever (CUDA_DEVICE_MAX_CONNECTIONS=1, many streams,
CUDA_LAUNCH_BLOCKING=1).

Sends and receives have streams of the channel's own, which neither delay nor wait for the stage's computation. NCCL's
connection is not encrypted between hosts. Only a process that was told the id can join it.
"""

import os
import secrets
import struct
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels import gpu, libnccl
from lp_pipe.channels.async_receive import SIZE, PendingMemory
from lp_pipe.channels.base import Notify, TransferError
from lp_pipe.channels.channel_store import LIMIT, ChannelStore
from lp_pipe.channels.mixed_transport import MixedReceiver, MixedSender
from lp_pipe.channels.packing import Layout
from lp_pipe.channels.rank_transport import (
    CLOSE_PATIENCE,
    RECEIVER,
    SENDER,
    RankBackend,
    RankReceiver,
    RankSender,
)
from lp_pipe.channels.stream import StreamReceiver, StreamSender
from lp_pipe.errors import Unavailable

_HOST_ID, _HOST_ID_PREFIX = "NCCL_HOSTID", "lp_pipe-"
_SHARES_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
_KNOWS_SHARED_GPUS, _READS_HOST_ID_ONCE = (2, 30, 0), (2, 23, 0)  # versions of NCCL
_READY = b"ready"  # the start of a note; all others are the store's
_TOKEN = struct.Struct("<Q")


def check(device: torch.device) -> None:
    """Refuse an end that cannot use NCCL.

    Raises:
        ValueError: says why.
    """
    gpu.check("nccl", device)
    missing = libnccl.why_missing()
    if missing is not None:
        raise ValueError(f"channel kind 'nccl' needs NCCL: {missing}; install a torch with NCCL, or use channel='auto'")


class NcclBackend(RankBackend):
    name = "nccl"
    advice = "NCCL_SOCKET_IFNAME chooses the network, NCCL_DEBUG=INFO prints what NCCL does"

    def __init__(self, device: torch.device) -> None:
        check(device)
        self.device = device
        self._stream = torch.cuda.Stream(device=device)
        if libnccl.version() >= _KNOWS_SHARED_GPUS:
            os.environ.setdefault(_SHARES_GPU, "1")  # NCCL reads it when the process makes its first communicator

    def connect(self, store: ChannelStore, rank: int, address: str, patience: timedelta) -> "Communicator":
        store.set(f"address/{rank}", address)
        store.set(f"gpu/{rank}", f"{gpu.name_of(self.device)} {os.getpid()}")
        own, other = (store.get(f"gpu/{which}").decode() for which in (rank, 1 - rank))
        store.set(f"host/{rank}", host_ids.choose(own, other, libnccl.version()))
        check_hosts(own, other, store.get("host/0"), store.get("host/1"), libnccl.version())
        if rank == SENDER:
            store.set("id", libnccl.new_id())
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            handle = libnccl.init(store.get("id"), rank, patience, store.closed_reason)
            communicator = Communicator(handle, self.device, self._stream, store.closed_reason)
            # The first operation waits until the other end does the same. Later ones must not wait.
            first = [gpu.memory_on(self.device, 1).zero_()]
            try:
                work = communicator.send(first, RECEIVER, 0) if rank == SENDER else communicator.recv(first, SENDER, 0)
                work.wait(patience)
            except RuntimeError:
                communicator.abort("it could not connect")
                raise
        communicator.stopped = lambda: None
        return communicator

    def empty(self, size: int) -> Tensor:
        return gpu.memory_on(self.device, size)

    def tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        return gpu.tensors_in(memory, layout)

    def receiving(self) -> AbstractContextManager[Any]:
        """Allocate on the channel's stream, so that receiving does not wait for what the stage computes."""
        return torch.cuda.stream(self._stream)

    def give_up(self, group: "Communicator") -> None:
        group.abort("the sender is gone")

    def close(self, group: "Communicator", rank: int) -> None:
        group.abort("the channel is closed")


class Communicator:
    """Two ranks. `send` and `recv` are like those of torch.distributed's process groups, and queue on `stream`.

    stopped: returns why this end gives up, which an abort does, too.
    """

    def __init__(self, handle: Any, device: torch.device, stream: torch.cuda.Stream, stopped: libnccl.Stopped) -> None:
        self.stopped = stopped
        self._handle = handle
        self._device = device
        self._stream = stream
        self._lock = threading.Lock()  # NCCL's functions take one thread at a time
        self._ended: str | None = None

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> gpu.QueuedGpuWork:
        """Queue a send. The tag is not used: messages arrive in order, which is enough.

        Raises:
            RuntimeError: the communicator was aborted, or NCCL refuses.
        """
        return self._queue(libnccl.send, tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> gpu.QueuedGpuWork:
        """Queue a receive, like `send`."""
        return self._queue(libnccl.recv, tensors, peer)

    def why_ended(self) -> str | None:
        """Return why the communicator was given up, without asking NCCL."""
        return self._ended or self.stopped()

    def abort(self, reason: str) -> None:
        """Release threads that wait, and work on the GPU. Idempotent.

        Does not block: a thread of its own waits for NCCL, which may wait for the other end.
        """
        self._ended = self._ended or reason
        threading.Thread(target=self._abort, name="abort nccl", daemon=True).start()

    def _queue(self, do: Any, tensors: list[Tensor], peer: int) -> gpu.QueuedGpuWork:
        (memory,) = tensors
        with self._lock:
            if self._ended is not None:
                raise RuntimeError(self._ended)
            with torch.cuda.device(self._device):
                do(self._handle, memory.data_ptr(), memory.numel(), peer, self._stream.cuda_stream)
                libnccl.wait_until_ready(self._handle, LIMIT, self.why_ended)
                memory.record_stream(self._stream)  # keeps the memory until the stream is done with it
                return gpu.QueuedGpuWork(self._stream, self._failure)

    def _failure(self) -> str | None:
        with self._lock:
            return self.why_ended() or libnccl.failure(self._handle)

    def _abort(self) -> None:
        with self._lock:  # two threads may close an end at once
            handle, self._handle = self._handle, None
        if handle is not None:
            libnccl.abort(handle)


class HostIds:
    """The id of this process among NCCL's hosts. NCCL takes two ranks on one GPU only if they are on two hosts.

    NCCL 2.30 takes them on one host, too, where NCCL_MULTI_RANK_GPU_ENABLE says so. Before, an id of our own makes two
    hosts of them. From 2.23 on NCCL reads it when the process makes its first communicator, and never again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: str | None = None

    def choose(self, own: str, other: str, version: tuple[int, int, int]) -> str:
        """Return this process's id for a communicator of the ranks `own` and `other`: "GPU's name process's number".

        Raises:
            TransferError: both ranks are in one process.
        """
        if own == other:
            raise TransferError(
                "nccl: both ends are in one process, on one GPU, which NCCL refuses: use channel='auto'"
            )
        with self._lock:
            if self._read is not None and version >= _READS_HOST_ID_ONCE:
                return self._read
            if _gpu(own) == _gpu(other) and version < _KNOWS_SHARED_GPUS:
                prefix = f"{_HOST_ID_PREFIX}{os.getpid()}-"
                # An id of ours with another process's number was inherited, and would not tell the two apart.
                present = os.environ.get(_HOST_ID, _HOST_ID_PREFIX)
                if present.startswith(_HOST_ID_PREFIX) and not present.startswith(prefix):
                    os.environ[_HOST_ID] = prefix + secrets.token_hex(8)
            self._read = os.environ.get(_HOST_ID, "")
            return self._read


host_ids = HostIds()


def check_hosts(own: str, other: str, host: bytes, other_host: bytes, version: tuple[int, int, int]) -> None:
    """Refuse two ranks on one GPU that NCCL takes for one host.

    Raises:
        TransferError: says what to do instead.
    """
    if _gpu(own) == _gpu(other) and host == other_host and version < _KNOWS_SHARED_GPUS:
        raise TransferError(
            f"nccl: this process and its peer share {_gpu(own)}, and NCCL {'.'.join(map(str, version))} takes that for "
            "an error: it reads NCCL_HOSTID once, and both had a channel to another GPU before; use channel='auto', "
            "NCCL 2.30 or newer, or set another NCCL_HOSTID for each process"
        )


def _gpu(rank: str) -> str:
    return rank.rpartition(" ")[0]


class _NcclRankSender(RankSender):
    """The sending rank. Its thread waits until a message is complete, announces it, sends it, and takes the next."""

    backend: NcclBackend

    def __init__(self, backend: NcclBackend) -> None:
        super().__init__(backend)
        self._notify: Notify | None = None
        self._changed = threading.Condition()
        self._unsent = 0
        self._failure: str | None = None
        self._messages: SimpleQueue[tuple[int, gpu.QueuedGpuWork, Tensor] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, notify: Notify) -> None:
        self._notify = notify
        super().begin(notify)

    def finish(self) -> None:
        with self._changed:
            limit = CLOSE_PATIENCE.total_seconds()
            self._changed.wait_for(lambda: not self._unsent or self._failure is not None, limit)

    def close(self, reason: str) -> None:
        self._fail_all(reason)
        super().close(reason)

    def _send(self, token: int, memory: Tensor) -> None:
        group: Communicator = self.group()
        copied = gpu.QueuedGpuWork(torch.cuda.current_stream(memory.device), group.why_ended)
        with self._changed:
            if self._failure is not None:
                raise TransferError(self._failure)
            if self._thread is None:
                thread = threading.Thread(target=self._send_all, name="send nccl", daemon=True)
                thread.start()  # if the system has no more threads, the next call tries again
                self._thread = thread
            self._unsent += 1
        self._messages.put((token, copied, memory))

    def _send_all(self) -> None:
        while (message := self._messages.get()) is not None:
            token, copied, memory = message
            try:
                copied.wait(LIMIT)
                assert self._notify is not None, "a message needs a credit"
                self._notify(_READY + _TOKEN.pack(token))
                self.group().send([memory], RECEIVER, token).wait(LIMIT)
            except (RuntimeError, TransferError, Unavailable) as error:
                self._fail_all(f"nccl: {error}")
                with suppress(Unavailable):
                    self._store.set(f"failure/{SENDER}", f"nccl: {error}")
                return
            del message, memory  # frees the memory while this thread waits for the next message
            with self._changed:
                self._unsent -= 1
                self._changed.notify_all()

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()
        self._messages.put(None)


class _NcclRankReceiver(RankReceiver):
    """The receiving rank. It receives a message when it has both its header and the note that it is ready."""

    def __init__(self, backend: NcclBackend) -> None:
        super().__init__(backend)
        self._announced: dict[int, tuple[int, PendingMemory]] = {}
        self._is_ready: set[int] = set()  # tokens that came before their headers

    def accept(self, token: int, buffers: Sequence[Any]) -> PendingMemory | None:
        (size,) = SIZE.unpack_from(buffers[0])
        if not size:
            return None
        arrival = self._waiter.announce()
        self._announced[token] = size, arrival
        if token in self._is_ready:
            self._is_ready.remove(token)
            self._receive(token)
        return arrival

    def on_note(self, note: bytes) -> None:
        if not note.startswith(_READY):
            super().on_note(note)
            failure = self._store.known(f"failure/{SENDER}").decode()
            if failure:
                self._waiter.give_up(f"the other end: {failure}")
            return
        (token,) = _TOKEN.unpack_from(note, len(_READY))
        if token in self._announced:
            self._receive(token)
        else:
            self._is_ready.add(token)

    def _receive(self, token: int) -> None:
        size, arrival = self._announced.pop(token)
        # Not here: launching a receive may take as long as the bytes travel (CUDA_LAUNCH_BLOCKING=1).
        self._waiter.expect(lambda: self._start(token, size, None), arrival)


class NcclSender(MixedSender):
    def __init__(self, device: torch.device) -> None:
        super().__init__(StreamSender(), _NcclRankSender(NcclBackend(device)))


class NcclReceiver(MixedReceiver):
    def __init__(self, device: torch.device) -> None:
        super().__init__(StreamReceiver(), _NcclRankReceiver(NcclBackend(device)), device)
