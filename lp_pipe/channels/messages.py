"""The messages between a channel's two ends, as frames of one connection.

    sender                                   receiver
      open: channel, kind, sender's name,
            whether it supports a queue,
            where its rank listens        ──►
                                          ◄──  open: number of credits, where the queue is
      data: tag, layout if it is new, token,
            the transport's buffers       ──►
                                          ◄──  credit: token
      note: the transport's own          ◄──►  note: the transport's own

With a shared-memory queue (shm_queue.py) there are no frames for credits, and data frames only for messages with a new
layout or buffers; the queue has an entry for these, which keeps their place among the others.
Either end closes the connection with a reason. The connection's end also tells it that the other end died.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from lp_pipe.connections import Frame, frames

_TAG = struct.Struct("<q")

WAKE_UP = Frame(frames.CHANNEL_NOTE)  # wakes the end that waits for the queue, where transports have no notes
AS_FRAME = -1  # in the queue, in place of a token: the message comes as a frame


class Opening(NamedTuple):
    channel: str
    kind: str
    sender: str
    has_queue: bool
    address: str  # where the sender's rank listens, for transports with ranks

    def frame(self) -> Frame:
        body = json.dumps([self.kind, self.sender, self.has_queue, self.address]).encode()
        return Frame(frames.CHANNEL_OPEN, name=self.channel, body=body)

    @staticmethod
    def of(frame: Frame) -> "Opening":
        return Opening(frame.name, *json.loads(bytes(frame.body)))


class AbortedOperations(NamedTuple):
    """The order to give up the operations up to `tag`."""

    tag: int
    reason: str


def data_frame(tag: int, layout: bytes, token: int, buffers: Sequence[Any]) -> Frame:
    """Return the frame of a message.

    layout: b"" if it is the previous message's.
    """
    return Frame(frames.CHANNEL_DATA, token, body=_TAG.pack(tag) + layout, buffers=buffers)


def tag_and_layout(frame: Frame) -> tuple[int, bytes]:
    """Return what `data_frame` was given."""
    return _TAG.unpack_from(frame.body)[0], bytes(frame.body[_TAG.size :])
