"""gloo between a channel's two ranks, for CPU tensors.

    sender (rank 0)                                     receiver (rank 1)
      address, a secret word, its sockets ── notes ───►
                               ◄─────── notes ────────  address, a secret word, its sockets
      its word                 ◄─────── gloo ────────►  its word

gloo's own connection is plain, and its listener takes whoever comes first, so each end shows by its word that it is
the one that the notes came from. Who can read or change what passes on the network is not kept out by that.
"""

import contextlib
import hmac
import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lp_pipe.channels.base import TransferError
from lp_pipe.channels.buffer_pool import BufferPool
from lp_pipe.channels.channel_store import ChannelStore
from lp_pipe.channels.packing import Layout, TensorSpec, separate_tensors
from lp_pipe.channels.rank_transport import RECEIVER, TAGS, RankBackend, RankReceiver, RankSender
from lp_pipe.connections.resource_limits import check_descriptors
from lp_pipe.private_torch import gloo_group

_ABORT_TAG, _WORD_TAG = TAGS, TAGS + 1
_AT_ONCE = timedelta(milliseconds=1)
_WORD_BYTES = 32
# Those for a pair, and for others that are connecting: where gloo's thread finds none for who connects, the process
# ends.
_DESCRIPTORS = 64

_Group: Any = dist.ProcessGroupGloo if dist.is_available() else None  # torch's types lack its send and recv


class GlooBackend(RankBackend):
    name = "gloo"
    advice = "--interface chooses other addresses"

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise ValueError("channel kind 'gloo': this torch was built without it; use 'auto'")
        self._memory = BufferPool()

    def connect(self, store: ChannelStore, rank: int, address: str, patience: timedelta) -> Any:
        word = secrets.token_bytes(_WORD_BYTES)
        store.set(f"address/{rank}", address)
        store.set(f"word/{rank}", word)
        check_descriptors(_DESCRIPTORS)
        group = gloo_group(_Group, store, rank, address, patience)
        if not hmac.compare_digest(_shown(group, word, 1 - rank, patience), store.get(f"word/{1 - rank}")):
            raise TransferError(f"somebody else has connected to the port of gloo at {address}")
        return group

    def empty(self, size: int) -> Tensor:
        return self._memory.empty(TensorSpec(torch.uint8, (size,), (1,)))

    def tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        return separate_tensors(memory, layout)

    def give_up(self, group: Any) -> None:
        """gloo itself notices."""

    def close(self, group: Any, rank: int) -> None:
        """gloo closes the connection of a pair when one wait has timed out."""
        if rank != RECEIVER:
            return
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, device="cpu")], 1 - rank, _ABORT_TAG).wait(_AT_ONCE)


def _shown(group: Any, word: bytes, other: int, patience: timedelta) -> bytes:
    """The other end's word, for this one's."""
    shown = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device="cpu")
    own = torch.frombuffer(bytearray(word), dtype=torch.uint8)
    for work in (group.recv([shown], other, _WORD_TAG), group.send([own], other, _WORD_TAG)):
        work.wait(patience)
    return bytes(shown.tolist())


class GlooSender(RankSender):
    def __init__(self) -> None:
        super().__init__(GlooBackend())


class GlooReceiver(RankReceiver):
    def __init__(self) -> None:
        super().__init__(GlooBackend())
