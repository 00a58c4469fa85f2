"""The receiver's half of transports whose bytes come by themselves, once their header has been seen.

    header: how many bytes   ──►  the connection's thread starts to receive them
    the bytes                ──►  a thread of async_receive.py waits for them
                                  the stage asks for them, and waits for that thread

The receive starts when the header is there and not when the stage asks, so two stages that send to each other do not
wait for each other.
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


class Work(Protocol):
    """As torch.distributed's Work."""

    def wait(self, timeout: timedelta, /) -> Any:
        """Until it is done.

        Raises:
            RuntimeError: it failed, or the time has passed.
        """


class ReceiveWaiter:
    """Messages in the order in which they come. Ended by `give_up`, which may be called by any thread, also twice.

    means: what receives them ("gloo").
    """

    def __init__(self, means: str) -> None:
        self._means = means
        self._lock = threading.Lock()
        self._works: SimpleQueue[tuple[Work, Tensor, PendingMemory] | Callable[[], None] | None] = SimpleQueue()
        self._pending: dict[int, PendingMemory] = {}
        self._reason: str | None = None
        self._thread: threading.Thread | None = None

    def expect(self, work: Work, memory: Tensor) -> PendingMemory:
        """The work's memory, once its message is there; TransferError when it will not come."""
        arrival: PendingMemory = Future()
        with self._lock:
            if self._reason is not None:
                arrival.set_exception(TransferError(self._reason))
                return arrival
            self._pending[id(arrival)] = arrival
            self._start()
        self._works.put((work, memory, arrival))
        return arrival

    def then(self, call: Callable[[], None]) -> None:
        """`call` once what is expected now has come, or failed; never after `give_up`."""
        with self._lock:
            if self._reason is not None:
                return
            self._start()
        self._works.put(call)

    def give_up(self, reason: str) -> None:
        """Nothing more will come. The thread may be stuck in gloo for a while yet, with one message's memory."""
        with self._lock:
            self._reason = self._reason or reason
            pending, self._pending = list(self._pending.values()), {}
        self._works.put(None)
        for arrival in pending:
            with suppress(InvalidStateError):  # it has come at this moment
                arrival.set_exception(TransferError(reason))

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._wait_for_all, name=f"receive {self._means}", daemon=True)
            thread.start()  # before it counts: the system may have no more
            self._thread = thread

    def _wait_for_all(self) -> None:
        while (item := self._works.get()) is not None:
            if not isinstance(item, tuple):
                item()
                continue
            work, memory, arrival = item
            error = _error_of(work)
            with self._lock:
                self._pending.pop(id(arrival), None)
            with suppress(InvalidStateError):
                if error is None:
                    arrival.set_result(memory)
                else:
                    arrival.set_exception(TransferError(f"{self._means}: {error}"))
            del item, work, memory, arrival  # until the next one comes: memory that nobody uses is used again


def _error_of(work: Work) -> str | None:
    try:
        work.wait(LIMIT)
    except RuntimeError as error:
        return str(error)
    return None


SIZE = struct.Struct("<Q")  # what a header begins with; 0: there are no bytes

_LAST_BYTES_S = {"near": 1.0, "far": 5.0}


class AsyncReceiver(TransportReceiver):
    """means: what brings the bytes ("gloo"), for messages. device: where the tensors are to be."""

    def __init__(self, means: str, device: torch.device = CPU) -> None:
        super().__init__()
        self._means = means
        self._device = device
        self._waiter = ReceiveWaiter(means)
        self._giving_up: threading.Timer | None = None

    @abstractmethod
    def _start(self, token: int, size: int, header: Any) -> tuple[Work, Tensor]:
        """Begin to receive; returns what to wait for, and the memory (uint8) that has the bytes then.

        Raises:
            TransferError: they will not come.
            RuntimeError: likewise.
            OSError: there is no memory for them.
        """

    @abstractmethod
    def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        """Those that lie in memory that has arrived, each with a storage of its own."""

    def accept(self, token: int, buffers: Sequence[Any]) -> "PendingMemory | TransferError | None":
        (size,) = SIZE.unpack_from(buffers[0])
        if not size:
            return None
        try:
            return self._waiter.expect(*self._start(token, size, buffers[0]))
        except TransferError as error:
            return error
        except RuntimeError as error:
            return TransferError(f"{self._means}: {error}")
        except OSError as error:
            return TransferError(f"the receiver cannot take a message of {size} bytes: {error}")

    def read(self, layout: Layout, parcel: "PendingMemory | TransferError | None") -> list[Tensor]:
        if isinstance(parcel, TransferError):
            raise parcel
        if parcel is None:
            return [empty_tensor(spec, self._device) for spec in layout.tensor_specs]
        return self._tensors_in(parcel.result(), layout)

    def drop(self, parcel: "PendingMemory | TransferError | None", then: Callable[[], None]) -> None:
        if isinstance(parcel, Future):
            parcel.add_done_callback(lambda _: then())  # the sender's memory is used until then
        else:
            then()

    def when_received(self, call: Callable[[], None]) -> None:
        """Once what was accepted so far has come; `call` must not block."""
        self._waiter.then(call)

    def end(self, reason: str) -> None:
        """What was sent before an orderly end still comes; what a link that was cut has kept does not."""
        patience_s = _LAST_BYTES_S["near" if is_loopback(self.address) else "far"]
        self._giving_up = threading.Timer(patience_s, self._give_up, (reason,))
        self._giving_up.name, self._giving_up.daemon = f"give up {self._means}", True
        try:
            self._giving_up.start()
        except RuntimeError:  # out of threads: who waits for a message must not wait for ever
            self._give_up(reason)

    def close(self, reason: str) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._waiter.give_up(reason)
