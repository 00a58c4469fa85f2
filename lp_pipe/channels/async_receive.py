"""The receiving half of transports whose bytes arrive on their own, once a header has announced them.

    header with the size   ──►  the connection's thread starts to receive the bytes
    the bytes              ──►  ReceiveWaiter's thread waits for them
                                the stage asks for them, and waits for that thread

The receive starts when the header is there, not when the stage asks. So two stages that send to each other do not
wait for each other.

gloo (torch 2.13) does not wake a thread that waits for a message of which the beginning has arrived when the sender
dies, is cut off, or when the pair is closed. Only the wait's own time limit ends it. So a thread of ours waits there,
and the stage waits for that thread, which `give_up` releases.
"""

import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from lp_pipe.channels.base import TransferError, TransportReceiver
from lp_pipe.channels.channel_store import LIMIT
from lp_pipe.channels.packing import CPU, Layout, empty_tensor
from lp_pipe.connections.routes import is_loopback

PendingMemory = Future[Tensor]


class AsyncOperation(Protocol):
    """An operation in progress, like torch.distributed's Work."""

    def wait(self, timeout: timedelta, /) -> Any:
        """Wait until the operation is done.

        Raises:
            RuntimeError: it failed, or the time has passed.
        """


Begin = Callable[[], tuple[AsyncOperation, Tensor]]  # starts to receive; returns the operation, and its memory


class ReceiveWaiter:
    """Waits for asynchronous receives, in order, in a thread of its own.

    backend: what receives the bytes, for messages and thread names ("gloo").
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._receives: SimpleQueue[tuple[Begin, PendingMemory] | Callable[[], None] | None] = SimpleQueue()
        self._pending: dict[int, PendingMemory] = {}
        self._reason: str | None = None
        self._thread: threading.Thread | None = None

    def announce(self) -> PendingMemory:
        """Return a future of a message's memory. It raises TransferError if the message will not arrive."""
        arrival: PendingMemory = Future()
        with self._lock:
            if self._reason is None:
                self._pending[id(arrival)] = arrival
            else:
                arrival.set_exception(TransferError(self._reason))
        return arrival

    def expect(self, begin: Begin, arrival: PendingMemory) -> None:
        """Receive an announced message; the waiter's thread calls `begin` after all earlier messages have arrived."""
        with self._lock:
            if self._reason is not None:
                return
            self._start()
        self._receives.put((begin, arrival))

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` once all messages expected so far have arrived or failed. It is not called after `give_up`."""
        with self._lock:
            if self._reason is not None:
                return
            self._start()
        self._receives.put(call)

    def give_up(self, reason: str) -> None:
        """Fail all receives that are pending, and those to come. Any thread may call this, also twice.

        The waiting thread may be stuck in gloo for some more time, and keeps the memory of one message.
        """
        with self._lock:
            self._reason = self._reason or reason
            pending, self._pending = list(self._pending.values()), {}
        self._receives.put(None)
        for arrival in pending:
            with suppress(InvalidStateError):  # it arrived at this moment
                arrival.set_exception(TransferError(reason))

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._wait_for_all, name=f"receive {self._backend}", daemon=True)
            thread.start()  # if the system has no more threads, the next call tries again
            self._thread = thread

    def _wait_for_all(self) -> None:
        while (item := self._receives.get()) is not None:
            if not isinstance(item, tuple):
                item()
                continue
            begin, arrival = item
            outcome = self._receive(begin)
            with self._lock:
                self._pending.pop(id(arrival), None)
            with suppress(InvalidStateError):
                if isinstance(outcome, Tensor):
                    arrival.set_result(outcome)
                else:
                    arrival.set_exception(outcome)
            del item, begin, outcome, arrival  # frees the memory while this thread waits for the next message

    def _receive(self, begin: Begin) -> Tensor | TransferError:
        try:
            work, memory = begin()
            work.wait(LIMIT)
        except TransferError as error:
            return error
        except (RuntimeError, OSError) as error:
            return TransferError(f"{self._backend}: {error}")
        return memory


SIZE = struct.Struct("<Q")  # the start of a header; 0: no bytes follow

# How long bytes that a sender has sent before its orderly end may take to arrive.
_LAST_BYTES_S = {"loopback": 1.0, "network": 5.0}


class AsyncReceiver(TransportReceiver):
    """The receiving half of an asynchronous transport.

    backend: as for ReceiveWaiter. device: where received tensors are put.
    """

    def __init__(self, backend: str, device: torch.device = CPU) -> None:
        super().__init__()
        self._backend = backend
        self._device = device
        self._waiter = ReceiveWaiter(backend)
        self._give_up_timer: threading.Timer | None = None

    @abstractmethod
    def _start(self, token: int, size: int, header: Any) -> tuple[AsyncOperation, Tensor]:
        """Start to receive a message; return its operation, and the memory (uint8) that holds the bytes afterwards.

        Raises:
            TransferError, RuntimeError: the bytes will not arrive.
            OSError: there is no memory for them.
        """

    @abstractmethod
    def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        """Return the tensors in memory that has arrived, each with a storage of its own."""

    def accept(self, token: int, buffers: Sequence[Any]) -> "PendingMemory | TransferError | None":
        (size,) = SIZE.unpack_from(buffers[0])
        if not size:
            return None
        try:
            started = self._start(token, size, buffers[0])
        except TransferError as error:
            return error
        except RuntimeError as error:
            return TransferError(f"{self._backend}: {error}")
        except OSError as error:
            return TransferError(f"the receiver cannot take a message of {size} bytes: {error}")
        arrival = self._waiter.announce()
        self._waiter.expect(lambda: started, arrival)
        return arrival

    def read(self, layout: Layout, parcel: "PendingMemory | TransferError | None") -> list[Tensor]:
        if isinstance(parcel, TransferError):
            raise parcel
        if parcel is None:
            return [empty_tensor(spec, self._device) for spec in layout.tensor_specs]
        return self._tensors_in(parcel.result(), layout)

    def drop(self, parcel: "PendingMemory | TransferError | None", then: Callable[[], None]) -> None:
        if isinstance(parcel, Future):
            parcel.add_done_callback(lambda _: then())  # the sender must not reuse its memory before that
        else:
            then()

    def when_received(self, call: Callable[[], None]) -> None:
        """Call `call` once all accepted messages have arrived; `call` must not block."""
        self._waiter.then(call)

    def end(self, reason: str) -> None:
        """Give up after a while: bytes sent before an orderly end still arrive, those on a link that was cut do not."""
        timeout_s = _LAST_BYTES_S["loopback" if is_loopback(self.address) else "network"]
        self._give_up_timer = threading.Timer(timeout_s, self._give_up, (reason,))
        self._give_up_timer.name, self._give_up_timer.daemon = f"give up {self._backend}", True
        try:
            self._give_up_timer.start()
        except RuntimeError:  # out of threads: a pending receive must not wait for ever
            self._give_up(reason)

    def close(self, reason: str) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._waiter.give_up(reason)
