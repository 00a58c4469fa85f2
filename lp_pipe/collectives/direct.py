"""Collective operations between any hosts, over a channel from each rank to each other one.

    all_reduce    rank k gets part k of all tensors, adds the parts in rank order, and sends the sum to the others

It moves as many bytes as a ring, 2(n - 1)/n of the tensor to and from each of n ranks, but the order of its additions
does not depend on the part.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lp_pipe.channels.hub import ChannelHub
from lp_pipe.channels.packing import CPU
from lp_pipe.channels.sender import Sender, open_sender
from lp_pipe.collectives.backend import (
    MISMATCH,
    Backend,
    Call,
    GenerationOver,
    Reduce,
    check_exchanged,
    check_parts,
    check_root,
    flat_view,
    mismatch_text,
    place_of_call,
    reducing,
)
from lp_pipe.errors import ChannelClosed, CollectiveMismatch, Unavailable
from lp_pipe.membership import Membership
from lp_pipe.telemetry import waits

_CREDITS = 4
_PIECE_BYTES = 512 << 10  # of a rank's part: large tensors are added in so large pieces
# The news that a rank has ended may be quicker than what it has sent before.
_GRACE_S = 0.2
_ALL_TAGS = (1 << 63) - 1

Send = Callable[[int, Any], None]
Receive = Callable[[int], Any]


class DirectBackend(Backend):
    """A rank with a channel to and from each other one.

    senders, receivers: the `send` and `receive` of its ends, by rank. They take a tag, which is the call's number.
    end: end(reason, grace_s) ends all channels, whose other ends get the reason, but goes on receiving for grace_s.
    number: of the last call over these channels.
    open_subgroup: opens the channels among some of the ranks.
    device: where the receivers put tensors, and where these are added.
    """

    is_exact: ClassVar[bool] = True

    def __init__(
        self,
        membership: Membership,
        senders: Mapping[int, Send],
        receivers: Mapping[int, Receive],
        end: Callable[[str, float], None],
        number: int = 0,
        open_subgroup: "Callable[[Sequence[int]], DirectBackend] | None" = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(membership)
        self._open_subgroup = open_subgroup
        self._device = device
        self._senders = senders
        self._receivers = receivers
        self._end = end
        self.number = number
        self._error: type[GenerationOver | CollectiveMismatch] = GenerationOver
        self._reason = ""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def all_reduce(self, tensor: Tensor, op: str = "sum", call: Call | None = None) -> None:
        # Of piece i + 1 the parts travel while piece i is added, and the sums of piece i - 1 come back: each rank's
        # message m goes out after m - 2 have come in, so the channels' credits suffice.
        flat = flat_view(tensor)
        added = flat.to(self._device)
        reduce, pieces = reducing(op, tensor.dtype), self._cut(added)
        own = self._begin(call or Call("all_reduce", op, tensor.dtype, tuple(tensor.shape)), pieces[0])
        before: tuple[Sequence[Tensor], Tensor] | None = None
        for index, parts in enumerate(pieces):
            if index + 1 < len(pieces):
                self._send_all(pieces[index + 1])
            mine = parts[self.rank]
            told = self._receive_all(mine, own[0]) if index else self._told(own, mine)
            total = self._reduced(told, mine, reduce, op)
            self._send_all([total] * self.world_size)
            if before is not None:
                self._receive_sums(*before)
            before = parts, total
        assert before is not None, "there is at least one piece"
        self._receive_sums(*before)
        if added is not flat:
            flat.copy_(added)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str = "sum", call: Call | None = None) -> None:
        check_parts("reduce_scatter", input, output, self.world_size)
        reduce = reducing(op, input.dtype)
        parts, flat = self._equal_parts(input.to(self._device)), flat_view(output)
        own = self._exchange(call or Call("reduce_scatter", op, input.dtype, tuple(input.shape)), parts)
        added = flat if flat.device == self._device else self.empty(len(flat), flat.dtype)
        self._reduced(own, added, reduce, op)
        if added is not flat:
            flat.copy_(added)

    def all_gather(self, output: Tensor, input: Tensor, call: Call | None = None) -> None:
        check_parts("all_gather", output, input, self.world_size)
        call = call or Call("all_gather", "", input.dtype, tuple(input.shape))
        gathered = self._exchange(call, [flat_view(input).to(self._device)] * self.world_size)
        self._put(output, gathered)

    def broadcast(self, tensor: Tensor, root: int, call: Call | None = None) -> None:
        check_root(root, self.world_size)
        flat = flat_view(tensor)
        call = call or Call("broadcast", "", tensor.dtype, tuple(tensor.shape), root)
        sent = flat.to(self._device) if self.rank == root else self.empty(0, flat.dtype)
        flat.copy_(self._exchange(call, [sent] * self.world_size)[root])

    def all_to_all(self, output: Tensor, input: Tensor, call: Call | None = None) -> None:
        check_exchanged(output, input, self.world_size)
        call = call or Call("all_to_all", "", input.dtype, tuple(input.shape))
        self._put(output, self._exchange(call, self._equal_parts(input.to(self._device))))

    def barrier(self, call: Call | None = None) -> None:
        self._exchange(call or Call("barrier"), [self.empty(0, torch.uint8)] * self.world_size)

    def agree(self, value: int, call: Call | None = None) -> bool:
        own = torch.tensor([value], dtype=torch.int64, device=CPU)
        return all(int(other) == value for other in self._exchange(call or Call("agree"), [own] * self.world_size))

    def subgroup(self, ranks: Sequence[int]) -> "DirectBackend":
        assert self._open_subgroup is not None  # those without have no Group
        return self._open_subgroup(ranks)

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._end(self._reason, _GRACE_S)

    def close(self) -> None:
        self._reason = self._reason or f"{self.membership.members[self.rank]} has left the group"
        self._end(self._reason, 0.0)

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    def _exchange(self, call: Call, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its part; return what the ranks have sent to this one, in rank order.

        Raises:
            GenerationOver, CollectiveMismatch: see Backend.
        """
        own = self._begin(call, parts)
        return self._told(own, parts[self.rank])

    def _begin(self, call: Call, parts: Sequence[Tensor]) -> tuple[str, str]:
        """Send each rank its part with the call and its place, which are returned."""
        if self._reason:
            raise self._error(self._reason)
        self.number += 1
        own = str(call), place_of_call()
        self._send_all([(*own, part) for part in parts])
        return own

    def _told(self, own: tuple[str, str], part: Tensor) -> list[Tensor]:
        """Return what the ranks have sent to this one by `_begin`, in rank order."""
        received = self._receive_all((*own, part), own[0])
        calls = {rank: (text, place) for rank, (text, place, _) in enumerate(received)}
        if any(text != own[0] for text, _ in calls.values()):
            self._error = CollectiveMismatch
            self.abort(mismatch_text(self.membership.members, calls))
            raise self._error(self._reason)
        return [part for _, _, part in received]

    def _cut(self, flat: Tensor) -> list[list[Tensor]]:
        """Return the pieces of a tensor, each with a part for each rank to add."""
        size = _PIECE_BYTES // flat.itemsize * self.world_size
        pieces = list(flat.split(size)) if self._open_subgroup is not None and len(flat) else [flat]
        ranks = self._ranks
        return [
            [piece[len(piece) * k // len(ranks) : len(piece) * (k + 1) // len(ranks)] for k in ranks]
            for piece in pieces
        ]

    def _receive_sums(self, parts: Sequence[Tensor], own: Tensor) -> None:
        """Put the sums that the ranks have made into the parts of a piece."""
        for part, summed in zip(parts, self._receive_all(own, "all_reduce, its sums"), strict=True):
            part.copy_(summed)

    def _send_all(self, values: Sequence[Any]) -> None:
        try:
            for rank, send in self._senders.items():
                send(self.number, values[rank])
        except ChannelClosed as error:
            raise self._over(error) from error

    def _receive_all(self, own: Any, call: str) -> list[Any]:
        try:
            return [self._received(rank, call) if rank != self.rank else own for rank in self._ranks]
        except ChannelClosed as error:
            raise self._over(error) from error

    def _received(self, rank: int, call: str) -> Any:
        if self._open_subgroup is None:  # the ranks are replicas of a stage: the channel's own wait names their nodes
            return self._receivers[rank](self.number)
        with waits.waiting(waits.RANKS, waits.Target(peer=self.membership.members[rank]), call):
            return self._receivers[rank](self.number)

    def _over(self, error: ChannelClosed) -> Exception:
        """Return what a call raises once a channel has ended, for the reason that its other end gave."""
        reason = self._reason or str(error)
        if MISMATCH in reason:
            self._error = CollectiveMismatch
            reason = reason[reason.index(MISMATCH) :]
        self.abort(reason)
        return self._error(self._reason)

    def _reduced(self, parts: Sequence[Tensor], output: Tensor, reduce: Reduce, op: str) -> Tensor:
        """Add the parts in rank order into `output`, which may be this rank's own part; return it."""
        if len(parts) == 1:
            output.copy_(parts[0])
        total = parts[0]
        for rank, part in enumerate(parts[1:], start=1):
            # Before the own part, the sum is made in the first one, which was received and belongs to this rank.
            reduce(total, part, out=total if rank < self.rank else output)
            total = total if rank < self.rank else output
        return output.div_(self.world_size) if op == "mean" else output

    def _equal_parts(self, tensor: Tensor) -> list[Tensor]:
        count = tensor.numel() // self.world_size
        return list(flat_view(tensor).split(count)) if count else [flat_view(tensor)] * self.world_size

    def _put(self, output: Tensor, parts: Sequence[Tensor]) -> None:
        for place, part in zip(self._equal_parts(output), parts, strict=True):
            place.copy_(part)


def joined_by_channels(
    membership: Membership, hub: ChannelHub, endpoints: Sequence[str], *, is_subgroup: bool = False
) -> DirectBackend:
    """Open the channels to all other ranks; they end with the backend.

    hub: of this node, for these channels and those of subgroups. endpoints: of the hubs of all ranks, in rank order.

    Raises:
        GenerationOver: a rank is gone.
        ValueError: the ranks cannot be joined by channels.
    """
    names, own = membership.members, membership.rank
    others = [rank for rank in range(len(names)) if rank != own]
    receivers = {rank: hub.receiver(_channel(membership, rank, own), _CREDITS) for rank in others}
    senders: dict[int, Sender] = {}
    try:
        for rank in others:
            name = _channel(membership, own, rank)
            senders[rank] = open_sender(endpoints[rank], name, name=names[own], peer=names[rank])
    except Unavailable as error:
        if not is_subgroup:
            hub.close(str(error))
        raise GenerationOver(str(error)) from error

    def end_receiving(reason: str) -> None:
        for receiver in receivers.values():
            receiver.abort(_ALL_TAGS, reason)
            receiver.close(reason)
        if not is_subgroup:
            hub.close(reason)

    def end(reason: str, grace_s: float) -> None:
        for sender in senders.values():
            sender.abort(_ALL_TAGS, reason)
            sender.close(reason)
        if not grace_s:
            end_receiving(reason)
            return
        later = threading.Timer(grace_s, end_receiving, (reason,))
        later.daemon = True
        later.start()

    def open_subgroup(ranks: Sequence[int]) -> DirectBackend:
        return joined_by_channels(
            membership.of_subgroup(ranks), hub, [endpoints[rank] for rank in ranks], is_subgroup=True
        )

    return DirectBackend(
        membership,
        {rank: sender.send for rank, sender in senders.items()},
        {rank: receiver.receive for rank, receiver in receivers.items()},
        end,
        open_subgroup=open_subgroup,
    )


def _channel(membership: Membership, sender: int, receiver: int) -> str:
    return f"{membership.group}, generation {membership.generation}: rank {sender} to {receiver}"
