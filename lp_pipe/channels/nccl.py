"""NCCL between a channel's two ranks, for tensors on GPUs; CPU tensors pass through the connection, as in stream.py.

    sender (rank 0)                                     receiver (rank 1)
      its GPU, the communicator's id ── notes ────────►
                               ◄─────── notes ────────  its GPU
      one byte                 ──────── NCCL ─────────►

A message is copied on the stage's current stream, and sent and received on streams of the channel's own, so that it
neither delays nor waits for the stage's computation. NCCL's connection is not encrypted between hosts. Only a process
that was told the id can join it.
"""

import os
import secrets
import threading
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels import gpu, libnccl
from lp_pipe.channels.base import TransferError
from lp_pipe.channels.channel_store import ChannelStore
from lp_pipe.channels.mixed_transport import MixedReceiver, MixedSender
from lp_pipe.channels.packing import Layout
from lp_pipe.channels.rank_transport import RECEIVER, SENDER, RankBackend, RankReceiver, RankSender
from lp_pipe.channels.stream import StreamReceiver, StreamSender

_HOST_ID, _HOST_ID_PREFIX = "NCCL_HOSTID", "lp_pipe-"


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

    def connect(self, store: ChannelStore, rank: int, address: str, patience: timedelta) -> "Communicator":
        store.set(f"address/{rank}", address)
        store.set(f"gpu/{rank}", f"{gpu.name_of(self.device)} {os.getpid()}")
        _pretend_two_hosts(store.get("gpu/0").decode(), store.get("gpu/1").decode())
        if rank == SENDER:
            store.set("id", libnccl.new_id())
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            communicator = Communicator(libnccl.init(store.get("id"), rank), self.device, self._stream)
            # The first operation waits on the host until the other end does the same. Later ones must not wait.
            first = [gpu.memory_on(self.device, 1).zero_()]
            try:
                work = communicator.send(first, RECEIVER, 0) if rank == SENDER else communicator.recv(first, SENDER, 0)
                work.wait(patience)
            except RuntimeError:
                communicator.abort("it could not connect")
                raise
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
    """Two ranks. `send` and `recv` are like those of torch.distributed's process groups, and queue on `stream`."""

    def __init__(self, handle: Any, device: torch.device, stream: torch.cuda.Stream) -> None:
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
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                do(self._handle, memory.data_ptr(), memory.numel(), peer, self._stream.cuda_stream)
                memory.record_stream(self._stream)  # keeps the memory until the stream is done with it
                return gpu.QueuedGpuWork(self._stream, self._failure)

    def _failure(self) -> str | None:
        with self._lock:
            return self._ended or libnccl.failure(self._handle)

    def _abort(self) -> None:
        with self._lock:  # two threads may close an end at once
            handle, self._handle = self._handle, None
        if handle is not None:
            libnccl.abort(handle)


def _pretend_two_hosts(one: str, other: str) -> None:
    """Let NCCL accept two processes on one GPU, which it does only if it takes them for two hosts.

    Raises:
        TransferError: both ends are one process.
    """
    if one == other:
        raise TransferError("nccl: both ends are in one process, on one GPU, which NCCL refuses: use channel='auto'")
    if one.split()[0] == other.split()[0]:
        own = f"{_HOST_ID_PREFIX}{os.getpid()}-"
        # An id of ours with another process's number was inherited: with it both would be on one host again.
        present = os.environ.get(_HOST_ID, _HOST_ID_PREFIX)
        if present.startswith(_HOST_ID_PREFIX) and not present.startswith(own):
            os.environ[_HOST_ID] = own + secrets.token_hex(8)


class NcclSender(MixedSender):
    def __init__(self, device: torch.device) -> None:
        super().__init__(StreamSender(), RankSender(NcclBackend(device)))


class NcclReceiver(MixedReceiver):
    def __init__(self, device: torch.device) -> None:
        super().__init__(StreamReceiver(), RankReceiver(NcclBackend(device)), device)
