"""What a channel's two ends say to each other, as frames of one connection.

    sender                                   receiver
      open: channel, kind, sender's name,
            whether it can use a queue,
            where its rank listens        ──►
                                          ◄──  open: number of credits, where the queue is
      data: tag, layout if it is new, token,
            the transport's buffers       ──►
                                          ◄──  credit: token
      note: the transport's own          ◄──►  note: the transport's own

With a queue (shm_queue.py) there are no frames for credits, and data comes as frames only where it has a new layout or
buffers; the queue says when, so that it keeps its place among the others.
Either end closes the connection with its reason; the connection's end is also how it learns that the other died.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from lp_pipe.connections import Frame, frames

_TAG = struct.Struct("<q")

NUDGE = Frame(frames.CHANNEL_NOTE)  # wakes who waits for what is on the queue; transports with a queue have no notes
AS_FRAME = -1  # on a queue, in place of a token: the message comes as a frame


class Opening(NamedTuple):
    channel: str
    kind: str
    sender: str
    has_queue: bool
    address: str  # where the sender's rank listens, if it makes one

    def frame(self) -> Frame:
        body = json.dumps([self.kind, self.sender, self.has_queue, self.address]).encode()
        return Frame(frames.CHANNEL_OPEN, name=self.channel, body=body)

    @staticmethod
    def of(frame: Frame) -> "Opening":
        return Opening(frame.name, *json.loads(bytes(frame.body)))


class Abort(NamedTuple):
    """Operations up to `tag` are given up."""

    tag: int
    reason: str


def data_frame(tag: int, layout: bytes, token: int, buffers: Sequence[Any]) -> Frame:
    """layout: empty when it is the previous message's."""
    return Frame(frames.CHANNEL_DATA, token, body=_TAG.pack(tag) + layout, buffers=buffers)


def tag_and_layout(frame: Frame) -> tuple[int, bytes]:
    return _TAG.unpack_from(frame.body)[0], bytes(frame.body[_TAG.size :])
