"""The receiver's half of transports whose bytes come by themselves, once their header has been seen.

    header: how many bytes   ──►  the connection's thread starts to receive them
    the bytes                ──►  a thread of arrivals.py waits for them
                                  the stage asks for them, and waits for that thread

The receive starts when the header is there and not when the stage asks, so two stages that send to each other do not
wait for each other.
"""

import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.arrivals import Arrival, Arrivals, Awaited
from lp_pipe.channels.packing import CPU, Layout, empty_tensor
from lp_pipe.channels.transport import Inlet, TransferError
from lp_pipe.connections.routes import is_loopback

SIZE = struct.Struct("<Q")  # what a header begins with; 0: there are no bytes

_LAST_BYTES_S = {"near": 1.0, "far": 5.0}


class ArrivingInlet(Inlet):
    """means: what brings the bytes ("gloo"), for messages. device: where the tensors are to be."""

    def __init__(self, means: str, device: torch.device = CPU) -> None:
        super().__init__()
        self._means = means
        self._device = device
        self._arrivals = Arrivals(means)
        self._giving_up: threading.Timer | None = None

    @abstractmethod
    def _start(self, token: int, size: int, header: Any) -> tuple[Awaited, Tensor]:
        """Begin to receive; returns what to wait for, and the memory (uint8) that has the bytes then.

        Raises:
            TransferError: they will not come.
            RuntimeError: likewise.
            OSError: there is no memory for them.
        """

    @abstractmethod
    def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        """Those that lie in memory that has arrived, each with a storage of its own."""

    def accept(self, token: int, buffers: Sequence[Any]) -> "Arrival | TransferError | None":
        (size,) = SIZE.unpack_from(buffers[0])
        if not size:
            return None
        try:
            return self._arrivals.expect(*self._start(token, size, buffers[0]))
        except TransferError as error:
            return error
        except RuntimeError as error:
            return TransferError(f"{self._means}: {error}")
        except OSError as error:
            return TransferError(f"the receiver cannot take a message of {size} bytes: {error}")

    def read(self, layout: Layout, parcel: "Arrival | TransferError | None") -> list[Tensor]:
        if isinstance(parcel, TransferError):
            raise parcel
        if parcel is None:
            return [empty_tensor(spec, self._device) for spec in layout.tensor_specs]
        return self._tensors_in(parcel.result(), layout)

    def drop(self, parcel: "Arrival | TransferError | None", then: Callable[[], None]) -> None:
        if isinstance(parcel, Future):
            parcel.add_done_callback(lambda _: then())  # the sender's memory is used until then
        else:
            then()

    def when_all_are_here(self, call: Callable[[], None]) -> None:
        """Once what was accepted so far has come; `call` must not block."""
        self._arrivals.then(call)

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
        self._arrivals.give_up(reason)
