"""Two ranks of a communicator that a channel makes for itself, beside whatever the user does with torch.distributed.

    sender (rank 0)                                     receiver (rank 1)
      what the backend needs to connect ── notes ─────►
                               ◄─────── notes ────────  likewise
                               ◄─────── backend ──────►

They find each other through the channel's own connection, which has mTLS between hosts: no further port, no store.
"""

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.note_store import CONNECT_PATIENCE_S, NoteStore
from lp_pipe.channels.packing import CPU, Layout
from lp_pipe.channels.transport import Half, Notify, TransferError
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.connections.routes import is_loopback
from lp_pipe.errors import Unavailable

SENDER, RECEIVER = 0, 1
TAGS = 1 << 30  # gloo's are 32 bits wide


class Backend(ABC):
    """What connects the ranks and moves the bytes; each end has its own.

    advice: for ends that cannot reach each other. device: where the memory is.
    """

    name: str
    advice: str
    device: torch.device = CPU

    @abstractmethod
    def connect(self, store: NoteStore, rank: int, address: str, patience: timedelta) -> Any:
        """A group with `send` and `recv` as those of torch.distributed.ProcessGroup, whose works can be waited for.

        Raises:
            RuntimeError, OSError: they cannot connect.
            TransferError: likewise, and there is nothing to add.
        """

    @abstractmethod
    def empty(self, size: int) -> Tensor:
        """Memory for a message (uint8)."""

    @abstractmethod
    def tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        """Those that lie in a message's memory, each with a storage of its own."""

    def receiving(self) -> AbstractContextManager[Any]:
        """Around `empty` and `recv` of a message that is received."""
        return nullcontext()

    @abstractmethod
    def give_up(self, group: Any) -> None:
        """The sender is gone, and what has not come by now will not."""

    @abstractmethod
    def close(self, group: Any, rank: int) -> None:
        """This end is closed: free whoever waits for a message."""


class Pair(Half):
    """One end of the two ranks. The group is made by a thread, because that waits for the other end."""

    def __init__(self, backend: Backend, rank: int) -> None:
        self.backend = backend
        self._rank = rank
        self._store = NoteStore()
        self._making: Future[Any] = Future()

    def begin(self, notify: Notify) -> None:
        self._store.begin(notify)
        name = f"connect {self.backend.name}"
        threading.Thread(target=self._make, args=(self._making,), name=name, daemon=True).start()

    def on_note(self, note: bytes) -> None:
        self._store.learn(note)
        failure = self._store.known(f"failure/{1 - self._rank}").decode()
        if failure:  # what this end waits for, here or in the backend, will not come
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
        """Waits until the ranks are connected; then has `send` and `recv`.

        Raises:
            TransferError: they cannot connect.
        """
        try:
            return self._making.result(2 * CONNECT_PATIENCE_S)  # its making has limits of its own
        except TimeoutError as error:
            raise TransferError(self._explained(f"they did not within {2 * CONNECT_PATIENCE_S:g} s")) from error

    def _fail(self, reason: str) -> None:
        """Free who waits for the group, if it is not made yet: NCCL's making cannot be interrupted."""
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
