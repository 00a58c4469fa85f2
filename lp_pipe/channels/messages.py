"""What a channel's two ends say to each other, as frames of one connection.

    sender                                   receiver
      open: channel, kind, sender's name  ──►
                                          ◄──  open: number of credits
      data: tag, layout if it is new, token,
            the transport's buffers       ──►
                                          ◄──  credit: token, what the transport gives back
      note: the transport's own          ◄──►  note: the transport's own

Either end closes the connection with its reason; the connection's end is also how it learns that the other died.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from lp_pipe.connections import Frame, frames

_TAG = struct.Struct("<q")


class Opening(NamedTuple):
    channel: str
    kind: str
    sender: str

    def frame(self) -> Frame:
        return Frame(frames.CHANNEL_OPEN, name=self.channel, body=json.dumps([self.kind, self.sender]).encode())

    @staticmethod
    def of(frame: Frame) -> "Opening":
        kind, sender = json.loads(bytes(frame.body))
        return Opening(frame.name, kind, sender)


class Abort(NamedTuple):
    """Operations up to `tag` are given up."""

    tag: int
    reason: str


def data_frame(tag: int, layout: bytes, token: int, buffers: Sequence[Any]) -> Frame:
    """layout: empty when it is the previous message's."""
    return Frame(frames.CHANNEL_DATA, token, body=_TAG.pack(tag) + layout, buffers=buffers)


def tag_and_layout(frame: Frame) -> tuple[int, bytes]:
    return _TAG.unpack_from(frame.body)[0], bytes(frame.body[_TAG.size :])
