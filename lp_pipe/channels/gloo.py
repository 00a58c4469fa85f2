"""Transport through torch.distributed: one pair of ranks for each channel, over gloo.

    sender (rank 0)                                     receiver (rank 1)
      addresses of its sockets ──────── notes ────────►
                               ◄─────── notes ────────  addresses of its sockets
      copies, starts to send   ── header: token, size ─►  has its connection's thread start to receive
      the copy is free again   ◄─────── credit ───────  the stage asks for it, and waits for the bytes

The bytes travel while both stages compute, moved by gloo's own thread. The receive starts when the header is there and
not when the stage asks, so two stages that send to each other do not wait for each other. The group is made directly,
beside whatever the user does with torch.distributed, and finds its peer through the channel's own connection: no
further port, no store. Its sockets are bound to the loopback, as they are plain.
"""

import contextlib
import pickle
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # as torch.distributed has it, and with types

from lp_pipe.channels.packing import Layout, TensorSpec, empty_tensor, separate_tensors, tensor_over
from lp_pipe.channels.recycler import Recycler
from lp_pipe.channels.transport import Half, Inlet, Notify, Outlet, TransferError
from lp_pipe.errors import Unavailable

_SENDER, _RECEIVER = 0, 1
_LIMIT = timedelta(minutes=30)  # torch's own; a dead peer is noticed at once, by the channel's connection
_AT_ONCE = timedelta(milliseconds=1)
_CLOSE_PATIENCE = timedelta(seconds=2)
_CONNECT_PATIENCE_S = 30.0
_SIZE = struct.Struct("<Q")
_TAGS = 1 << 30  # gloo's are 32 bits wide
_ABORT_TAG = _TAGS

_Group: Any = dist.ProcessGroupGloo if dist.is_available() else None  # torch's types lack its send, recv and _Options


class NoteStore(Store):
    """What gloo's two ends say to each other before they are connected, as notes of the channel."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed_reason: str | None = None
        self._notify: Notify | None = None

    def begin(self, notify: Notify) -> None:
        self._notify = notify

    def learn(self, note: bytes) -> None:
        key, value = pickle.loads(note)
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        with self._changed:
            self._closed_reason = self._closed_reason or reason
            self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        assert self._notify is not None
        note = pickle.dumps((key, value.encode() if isinstance(value, str) else bytes(value)))
        self.learn(note)
        self._notify(note)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta = _LIMIT) -> None:
        with self._changed:
            wanted = set(keys)
            self._changed.wait_for(lambda: self._closed_reason or wanted <= self._entries.keys(), _CONNECT_PATIENCE_S)
            if not wanted <= self._entries.keys():
                raise RuntimeError(self._closed_reason or f"the other end said nothing for {_CONNECT_PATIENCE_S} s")

    def has_extended_api(self) -> bool:
        return False


class _Pair(Half):
    """One end of the two ranks. The group is made by a thread, because that waits for the other end."""

    rank: int

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise ValueError("channel kind 'gloo': this torch was built without it; use 'auto'")
        self._store = NoteStore()
        self._making: Future[Any] = Future()
        self._memory = Recycler()

    def begin(self, notify: Notify) -> None:
        self._store.begin(notify)
        threading.Thread(target=self._make, args=(self._making,), name="connect gloo", daemon=True).start()

    def on_note(self, note: bytes) -> None:
        self._store.learn(note)

    def close(self, reason: str) -> None:
        self._store.close(reason)
        closed: Future[Any] = Future()
        closed.set_exception(TransferError(reason))
        self._making = closed

    def _group(self) -> Any:
        try:
            return self._making.result(_CONNECT_PATIENCE_S)
        except TimeoutError as error:
            raise TransferError(f"gloo did not connect within {_CONNECT_PATIENCE_S} s") from error

    def _make(self, making: Future[Any]) -> None:
        try:
            options = _Group._Options()
            options._devices = [_Group.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=_CONNECT_PATIENCE_S)
            making.set_result(_Group(self._store, self.rank, 2, options))
        except (RuntimeError, Unavailable) as error:
            making.set_exception(TransferError(f"gloo cannot connect: {error}"))


class GlooOutlet(_Pair, Outlet):
    """Tokens count the messages; each is sent as one piece, laid out as in shared memory."""

    rank = _SENDER

    def __init__(self) -> None:
        super().__init__()
        self._next = 0
        self._sending: dict[int, tuple[dist.Work, Tensor]] = {}

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        token, size = self._next, layout.offsets[-1]
        self._next += 1
        if size:
            memory = self._memory.empty(_bytes(size))
            for offset, spec, tensor in zip(layout.offsets, layout.tensor_specs, tensors, strict=False):
                tensor_over(memory, offset, spec).copy_(tensor)
            try:
                self._sending[token] = self._group().send([memory], _RECEIVER, token % _TAGS), memory
            except RuntimeError as error:
                raise TransferError(f"gloo: {error}") from error
        return token, [_SIZE.pack(size)]

    def release(self, token: int) -> None:
        sending = self._sending.pop(token, None)
        if sending is not None:
            _wait(sending[0], _CLOSE_PATIENCE)  # it has arrived, so this is a matter of microseconds

    def finish(self) -> None:
        for token in list(self._sending):
            sending = self._sending.pop(token, None)  # a work can be waited for once
            if sending is not None and not _wait(sending[0], _CLOSE_PATIENCE):
                return

    def close(self, reason: str) -> None:
        super().close(reason)
        self._sending.clear()


@dataclass(frozen=True)
class Incoming:
    """A message that arrives in `memory`. Its work is kept until then: gloo stops at a message that nobody takes."""

    memory: Tensor
    work: dist.Work


class GlooInlet(_Pair, Inlet):
    rank = _RECEIVER

    def accept(self, token: int, buffers: Sequence[Any]) -> "Incoming | TransferError | None":
        (size,) = _SIZE.unpack(buffers[0])
        if not size:
            return None
        memory = self._memory.empty(_bytes(size))
        try:
            return Incoming(memory, self._group().recv([memory], _SENDER, token % _TAGS))
        except TransferError as error:
            return error
        except RuntimeError as error:
            return TransferError(f"gloo: {error}")

    def read(self, layout: Layout, parcel: "Incoming | TransferError | None") -> list[Tensor]:
        if isinstance(parcel, TransferError):
            raise parcel
        if parcel is None:
            return [empty_tensor(spec) for spec in layout.tensor_specs]
        try:
            parcel.work.wait(_LIMIT)
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error
        return separate_tensors(parcel.memory, layout)

    def drop(self, parcel: "Incoming | TransferError | None") -> None:
        if isinstance(parcel, Incoming):
            _wait(parcel.work, _LIMIT)

    def end(self, reason: str) -> None:
        self._store.close(reason)

    def close(self, reason: str) -> None:
        making = self._making
        super().close(reason)
        if making.done() and making.exception() is None:
            _break(making.result())


def _bytes(size: int) -> TensorSpec:
    return TensorSpec(torch.uint8, (size,), (1,))


def _wait(work: dist.Work, limit: timedelta) -> bool:
    """False where it failed: then the channel's connection says why."""
    try:
        work.wait(limit)
    except RuntimeError:
        return False
    return True


def _break(group: Any) -> None:
    """Free everybody who waits for a message: gloo closes the connection of a pair when one wait has timed out."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], _SENDER, _ABORT_TAG).wait(_AT_ONCE)
