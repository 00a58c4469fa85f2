"""A transport on one host, through slots of shared memory: one copy for large messages, two for small ones.

    small    copies into a free slot ──── token ─────────────────►  receiver copies out
             slot is free again      ◄─── a byte in the segment ──
    large    copies into a free slot ──── token ─────────────────►  receiver uses the memory in place
             slot is free again      ◄─── a byte in the segment ──  the last tensor in it is freed

There are as many small slots as credits, and a slot is free before its credit comes back, so a sender with a credit
always finds a slot. A message that does not fit gets a new segment with larger slots; the old one is freed with its
last slot. The receiver may keep large slots as long as it likes (activations wait for their backward), and credits do
not wait for them: if none is free, one more segment is made. That takes no more memory than copies at the receiver.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.base import NoRoomError, TransferError, TransportReceiver, TransportSender
from lp_pipe.channels.packing import Layout, separate_tensors
from lp_pipe.channels.segments import OpenSegments, Segment, Slot
from lp_pipe.connections.resource_limits import describe_error

MIN_IN_PLACE_BYTES = 1 << 18  # for smaller messages, copying costs less than tracking the slot

_MIN_SLOT_BYTES = 1 << 16
_MIN_IN_PLACE_SLOTS = 4


class RingSender(TransportSender):
    """The sending end. Tokens number the slots of all segments that there ever were."""

    def __init__(self) -> None:
        self._small: list[Segment] = []  # at most one
        self._large: list[Segment] = []  # with slots of the same size
        self._outgrown: list[Segment] = []  # with messages in flight
        self._next_token = 0

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        segment, token = self._take_slot(layout.offsets[-1], credits)
        for target, tensor in zip(segment.slot(token).tensors(layout), tensors, strict=True):
            target.copy_(tensor)
        if segment.is_announced:
            return token, []
        segment.is_announced = True
        return token, [segment.announcement([used.first for used in (*self._small, *self._large)])]

    def _take_slot(self, size: int, credits: int) -> tuple[Segment, int]:
        """Return the segment and the token of a free slot of that size."""
        is_large = size >= MIN_IN_PLACE_BYTES
        segments = self._large if is_large else self._small
        if segments and segments[0].slot_bytes < size:
            self._outgrown += segments
            segments.clear()
        if self._outgrown:
            self._outgrown = [segment for segment in self._outgrown if segment.is_used]
        for segment in segments:
            token = segment.take()
            if token is not None:
                return segment, token
        slot_bytes = segments[0].slot_bytes if segments else max(_MIN_SLOT_BYTES, 1 << (size - 1).bit_length())
        count = max(credits, _MIN_IN_PLACE_SLOTS) if is_large else credits
        try:
            segment = Segment(self._next_token, count, slot_bytes, is_in_place=is_large)
        except OSError as error:
            what = f"{count * slot_bytes} bytes of shared memory for messages of {size} bytes"
            raise NoRoomError(error.errno, f"cannot allocate {what}: {describe_error(error)}") from error
        self._next_token += count
        segments.append(segment)
        token = segment.take()
        assert token is not None, "a new segment's slots are free"
        return segment, token


class RingReceiver(TransportReceiver):
    def __init__(self) -> None:
        self._segments = OpenSegments()
        self._failure: TransferError | None = None

    def accept(self, token: int, buffers: Sequence[Any]) -> "Slot | TransferError | Any":
        if buffers:
            try:
                self._segments.open(buffers[0])
            except OSError as error:
                self._failure = TransferError(f"the receiver cannot open the sender's memory: {describe_error(error)}")
        if self._failure is not None:
            return self._failure
        slot, is_in_place = self._segments.slot(token)
        return slot.in_place_buffer() if is_in_place else slot

    def read(self, layout: Layout, parcel: "Slot | TransferError | Any") -> list[Tensor]:
        if isinstance(parcel, TransferError):
            raise parcel
        if not isinstance(parcel, Slot):
            return separate_tensors(torch.frombuffer(parcel, dtype=torch.uint8), layout)
        try:
            return [tensor.clone() for tensor in parcel.tensors(layout)]
        finally:
            parcel.free()

    def drop(self, parcel: "Slot | TransferError | Any", then: Callable[[], None]) -> None:
        if isinstance(parcel, Slot):
            parcel.free()
        then()
