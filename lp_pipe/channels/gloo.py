"""gloo between a channel's two ranks, for CPU tensors.

    sender (rank 0)                                     receiver (rank 1)
      address, a secret, its sockets ── notes ────────►
                               ◄─────── notes ────────  address, a secret, its sockets
      its secret               ◄─────── gloo ────────►  its secret

gloo's own connection is not encrypted, and its listener accepts the first connection. So each end proves by its secret
that it is the one that sent the notes. This keeps out no attacker that can read or change the network's traffic.
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

_ABORT_TAG, _SECRET_TAG = TAGS, TAGS + 1
_AT_ONCE = timedelta(milliseconds=1)
_SECRET_BYTES = 32
# For a pair of ranks, and for strangers that connect: if gloo's thread finds no descriptor for one of these, it ends
# the process.
_DESCRIPTORS = 64

_Group: Any = dist.ProcessGroupGloo if dist.is_available() else None  # torch's types lack its send and recv


class GlooBackend(RankBackend):
    name = "gloo"
    advice = "--interface chooses other addresses"

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise ValueError("channel kind 'gloo': this torch was built without gloo; use channel='auto'")
        self._memory = BufferPool()

    def connect(self, store: ChannelStore, rank: int, address: str, patience: timedelta) -> Any:
        secret = secrets.token_bytes(_SECRET_BYTES)
        store.set(f"address/{rank}", address)
        store.set(f"secret/{rank}", secret)
        check_descriptors(_DESCRIPTORS)
        group = gloo_group(_Group, store, rank, address, patience)
        shown = _exchange_secrets(group, secret, 1 - rank, patience)
        if not hmac.compare_digest(shown, store.get(f"secret/{1 - rank}")):
            raise TransferError(f"a stranger has connected to gloo's port at {address}")
        return group

    def empty(self, size: int) -> Tensor:
        return self._memory.empty(TensorSpec(torch.uint8, (size,), (1,)))

    def tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        return separate_tensors(memory, layout)

    def give_up(self, group: Any) -> None:
        """Do nothing: gloo notices it by itself."""

    def close(self, group: Any, rank: int) -> None:
        """Let a wait time out: gloo then closes the connection of the pair."""
        if rank != RECEIVER:
            return
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, device="cpu")], 1 - rank, _ABORT_TAG).wait(_AT_ONCE)


def _exchange_secrets(group: Any, secret: bytes, other: int, patience: timedelta) -> bytes:
    """Send this end's secret, return the other end's."""
    received = torch.zeros(_SECRET_BYTES, dtype=torch.uint8, device="cpu")
    own = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
    for work in (group.recv([received], other, _SECRET_TAG), group.send([own], other, _SECRET_TAG)):
        work.wait(patience)
    return bytes(received.tolist())


class GlooSender(RankSender):
    def __init__(self) -> None:
        super().__init__(GlooBackend())


class GlooReceiver(RankReceiver):
    def __init__(self) -> None:
        super().__init__(GlooBackend())
