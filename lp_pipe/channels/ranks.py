"""Two ranks of torch.distributed that a channel makes for itself, beside whatever the user does with it.

    sender (rank 0)                                     receiver (rank 1)
      address, a secret word, its sockets ── notes ───►
                               ◄─────── notes ────────  address, a secret word, its sockets
      its word                 ◄─────── gloo ────────►  its word

They find each other through the channel's own connection, which has mTLS between hosts: no further port, no store.
gloo's own connection is plain, and its listener takes whoever comes first, so each end shows by its word that it is
the one that the notes came from. Who can read or change what passes on the network is not kept out by that.
"""

import contextlib
import hmac
import secrets
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lp_pipe.channels.note_store import CONNECT_PATIENCE_S, LIMIT, NoteStore
from lp_pipe.channels.recycler import Recycler
from lp_pipe.channels.transport import Half, Notify, TransferError
from lp_pipe.connections.routes import is_loopback
from lp_pipe.errors import Unavailable

SENDER, RECEIVER = 0, 1
TAGS = 1 << 30  # gloo's are 32 bits wide
_ABORT_TAG, _WORD_TAG = TAGS, TAGS + 1
_AT_ONCE = timedelta(milliseconds=1)
_WORD_BYTES = 32

_Group: Any = dist.ProcessGroupGloo if dist.is_available() else None  # torch's types lack its send, recv and _Options


class Pair(Half):
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

    def group(self) -> Any:
        """Waits until the ranks are connected; then has `send` and `recv`.

        Raises:
            TransferError: they cannot connect.
        """
        try:
            return self._making.result(2 * CONNECT_PATIENCE_S)  # its making has limits of its own
        except TimeoutError as error:
            raise TransferError(self._explained(f"they did not within {2 * CONNECT_PATIENCE_S:g} s")) from error

    def _make(self, making: Future[Any]) -> None:
        try:
            making.set_result(self._connected())
        except TransferError as error:
            making.set_exception(error)
        except (RuntimeError, Unavailable) as error:
            making.set_exception(TransferError(self._explained(str(error))))

    def _connected(self) -> Any:
        word = secrets.token_bytes(_WORD_BYTES)
        self._store.set(f"address/{self.rank}", self.address)
        self._store.set(f"word/{self.rank}", word)
        options = _Group._Options()
        options._devices = [_Group.create_device(hostname=self.address)]
        options._timeout = timedelta(seconds=CONNECT_PATIENCE_S)
        group = _Group(self._store, self.rank, 2, options)
        self._check_word(group, word)
        return group

    def _check_word(self, group: Any, word: bytes) -> None:
        other = 1 - self.rank
        shown = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        works = [group.recv([shown], other, _WORD_TAG), group.send([own], other, _WORD_TAG)]
        for work in works:
            work.wait(timedelta(seconds=CONNECT_PATIENCE_S))
        if not hmac.compare_digest(bytes(shown.tolist()), self._store.get(f"word/{other}")):
            raise TransferError(f"somebody else has connected to the port of gloo at {self.address}")

    def _explained(self, error: str) -> str:
        other = self._store.known(f"address/{1 - self.rank}").decode() or "the other end"
        text = f"gloo cannot connect {self.address} with {other}: {error}"
        if is_loopback(self.address):
            return text
        return f"{text}; can these two reach each other, at any port? --interface chooses other addresses"


def break_off(group: Any, rank: int) -> None:
    """Free everybody who waits for a message: gloo closes the connection of a pair when one wait has timed out."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], 1 - rank, _ABORT_TAG).wait(_AT_ONCE)


def arrives(work: dist.Work, limit: timedelta = LIMIT) -> bool:
    """Wait for it; False where it failed: then the channel's connection says why."""
    try:
        work.wait(limit)
    except RuntimeError:
        return False
    return True
