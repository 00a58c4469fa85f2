"""A transport through a communicator of two ranks, which the channel makes for itself, with gloo or NCCL.

    sender (rank 0)                                     receiver (rank 1)
      what the backend needs to connect ── notes ─────►
                               ◄─────── notes ────────  the same
                               ◄─────── backend ──────►
      copies, starts to send   ── header: token, size ─►  the connection's thread starts to receive
      the copy is free again   ◄─────── credit ───────  the stage asks for the bytes, and waits for them

The bytes travel while both stages compute, moved by the backend's own thread or stream. The ranks find each other over
the channel's own connection, which has mTLS between hosts: no other port and no store is needed. What the user does
with torch.distributed is not touched.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.async_receive import SIZE, AsyncOperation, AsyncReceiver
from lp_pipe.channels.base import Notify, TransferError, TransportEnd, TransportSender
from lp_pipe.channels.channel_store import CONNECT_PATIENCE_S, LIMIT, ChannelStore
from lp_pipe.channels.packing import CPU, Layout, tensor_over
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.connections.routes import is_loopback
from lp_pipe.errors import Unavailable

SENDER, RECEIVER = 0, 1
TAGS = 1 << 30  # gloo's are 32 bits wide


class RankBackend(ABC):
    """Connects the two ranks and moves the bytes. Each end has its own.

    advice: what to do if the ends cannot reach each other. device: where the memory is.
    """

    name: str
    advice: str
    device: torch.device = CPU

    @abstractmethod
    def connect(self, store: ChannelStore, rank: int, address: str, patience: timedelta) -> Any:
        """Return a group with `send` and `recv` like torch.distributed.ProcessGroup's.

        Raises:
            RuntimeError, OSError: the ranks cannot connect.
            TransferError: the same, with a complete message.
        """

    @abstractmethod
    def empty(self, size: int) -> Tensor:
        """Return memory for a message (uint8)."""

    @abstractmethod
    def tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        """Return the tensors in a message's memory, each with a storage of its own."""

    def receiving(self) -> AbstractContextManager[Any]:
        """Return a context manager for `empty` and `recv` of a received message."""
        return nullcontext()

    @abstractmethod
    def give_up(self, group: Any) -> None:
        """Abort what has not arrived by now: the sender is gone."""

    @abstractmethod
    def close(self, group: Any, rank: int) -> None:
        """Release the threads that wait for a message of this end, which is closed."""


class RankEnd(TransportEnd):
    """An end of the pair of ranks. A thread makes their group, because that waits for the other end."""

    def __init__(self, backend: RankBackend, rank: int) -> None:
        self.backend = backend
        self._rank = rank
        self._store = ChannelStore()
        self._making: Future[Any] = Future()

    def begin(self, notify: Notify) -> None:
        self._store.begin(notify)
        name = f"connect {self.backend.name}"
        threading.Thread(target=self._make, args=(self._making,), name=name, daemon=True).start()

    def on_note(self, note: bytes) -> None:
        self._store.learn(note)
        failure = self._store.known(f"failure/{1 - self._rank}").decode()
        if failure:  # the group that this end waits for will not be made
            reason = f"the other end: {failure}"
            self._store.close(reason)
            self._fail(reason)

    def close(self, reason: str) -> None:
        self._store.close(reason)
        self._fail(reason)
        closed: Future[Any] = Future()
        closed.set_exception(TransferError(reason))
        self._making = closed

    def group(self) -> Any:
        """Wait until the ranks are connected; return their group.

        Raises:
            TransferError: they cannot connect.
        """
        try:
            return self._making.result(2 * CONNECT_PATIENCE_S)  # making it has time limits of its own
        except TimeoutError as error:
            raise TransferError(self._explained(f"no connection within {2 * CONNECT_PATIENCE_S:g} s")) from error

    def _fail(self, reason: str) -> None:
        """Fail the threads that wait for the group, if it is not made yet: NCCL cannot be interrupted meanwhile."""
        with suppress(InvalidStateError):
            self._making.set_exception(TransferError(reason))

    def _make(self, making: Future[Any]) -> None:
        patience = timedelta(seconds=CONNECT_PATIENCE_S)
        try:
            group = self.backend.connect(self._store, self._rank, self.address, patience)
        except TransferError as error:
            failure = error
        except (RuntimeError, OSError) as error:  # Unavailable is one, too
            failure = TransferError(self._explained(describe_error(error)))
        else:
            try:
                making.set_result(group)
            except InvalidStateError:  # closed meanwhile
                self.backend.close(group, self._rank)
            return
        with suppress(InvalidStateError):
            making.set_exception(failure)
            with suppress(Unavailable):
                self._store.set(f"failure/{self._rank}", str(failure))

    def _explained(self, error: str) -> str:
        other = self._store.known(f"address/{1 - self._rank}").decode() or "the other end"
        text = f"{self.backend.name} cannot connect {self.address} with {other}: {error}"
        if is_loopback(self.address):
            return text
        return f"{text}; can these two reach each other, at any port? {self.backend.advice}"


CLOSE_PATIENCE = timedelta(seconds=2)


class RankSender(RankEnd, TransportSender):
    """The sending rank. Tokens number the messages. Each is sent as one block, laid out as in shared memory."""

    def __init__(self, backend: RankBackend) -> None:
        super().__init__(backend, SENDER)
        self._next = 0
        self._sending: dict[int, tuple[AsyncOperation, Tensor]] = {}

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        token, size = self._next, layout.offsets[-1]
        if size:
            memory = self.backend.empty(size)
            for offset, spec, tensor in zip(layout.offsets, layout.tensor_specs, tensors, strict=False):
                tensor_over(memory, offset, spec).copy_(tensor)
            self._send(token, memory)
        self._next += 1
        return token, [SIZE.pack(size)]

    def _send(self, token: int, memory: Tensor) -> None:
        """Start to send a message.

        Raises:
            TransferError: it cannot be sent.
        """
        try:
            self._sending[token] = self.group().send([memory], RECEIVER, token % TAGS), memory
        except RuntimeError as error:
            raise TransferError(f"{self.backend.name}: {error}") from error

    def release(self, token: int) -> None:
        sending = self._sending.pop(token, None)
        if sending is not None:
            arrives(sending[0], CLOSE_PATIENCE)  # the bytes have arrived, so this takes microseconds

    def finish(self) -> None:
        for token in list(self._sending):
            sending = self._sending.pop(token, None)  # an operation can be waited for once
            if sending is not None and not arrives(sending[0], CLOSE_PATIENCE):
                return

    def close(self, reason: str) -> None:
        making = self._making
        super().close(reason)
        self._sending.clear()
        if _is_made(making):
            self.backend.close(making.result(), SENDER)


class RankReceiver(RankEnd, AsyncReceiver):
    def __init__(self, backend: RankBackend) -> None:
        RankEnd.__init__(self, backend, RECEIVER)
        AsyncReceiver.__init__(self, backend.name, backend.device)

    def _start(self, token: int, size: int, header: Any) -> tuple[AsyncOperation, Tensor]:
        with self.backend.receiving():
            memory = self.backend.empty(size)
            return self.group().recv([memory], SENDER, token % TAGS), memory

    def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        return self.backend.tensors_in(memory, layout)

    def end(self, reason: str) -> None:
        self._store.close(reason)
        if _is_made(self._making):
            AsyncReceiver.end(self, reason)
        else:
            self._fail(reason)
            self._waiter.give_up(reason)

    def close(self, reason: str) -> None:
        making = self._making
        RankEnd.close(self, reason)
        AsyncReceiver.close(self, reason)
        if _is_made(making):
            self.backend.close(making.result(), RECEIVER)

    def _give_up(self, reason: str) -> None:
        super()._give_up(reason)
        if _is_made(self._making):
            self.backend.give_up(self._making.result())


def _is_made(making: "Future[Any]") -> bool:
    return making.done() and making.exception() is None


def arrives(work: AsyncOperation, limit: timedelta = LIMIT) -> bool:
    """Wait for an operation; return False if it failed, for which the channel's connection has the reason."""
    try:
        work.wait(limit)
    except RuntimeError:
        return False
    return True
