"""The messages between workers and the servers that sum their tensors, as frames of one connection.

    worker                                     server
      open: generation; name, rank, workers ─►
      part of a tensor                     ──►   adds the parts of all workers, in the order of their ranks
                                           ◄──   the sum of the parts
                                           ◄──   note: the workers' calls do not match

Either end closes the connection with a reason.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.channels.background_reader import eager
from lp_pipe.collectives.compression import Compression
from lp_pipe.connections import Connection, Frame, PulledConnection, frames
from lp_pipe.connections.base import OnClose, OnFrame
from lp_pipe.connections.kernel_calls import has_epoll

_PART = struct.Struct("<q I q B B Q")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


class PartKey(NamedTuple):
    """The key of a part's sum: the tensor's name, how often the name was used before, and the part's number."""

    name: str
    sequence: int
    part: int


class Part(NamedTuple):
    """A part of a tensor. numel, dtype: of the part itself, also where `tensors` are its compressed form.

    urgency: parts with a smaller number are sent first.
    tensors: one for each replica of the sender, which are to be added in order; or the compressed form of one.
    """

    key: PartKey
    numel: int
    dtype: torch.dtype
    tensors: Sequence[Tensor]
    is_compressed: bool = False
    urgency: int = 0


class ServerHello(NamedTuple):
    """The first message of a worker. workers: how many there are. compression: as `Compression.to_text`; "": none."""

    generation: int
    name: str
    rank: int
    workers: int
    compression: str

    def frame(self) -> Frame:
        body = json.dumps(self[2:]).encode()
        return Frame(frames.CHANNEL_OPEN, self.generation, self.name, body)

    @classmethod
    def of(cls, frame: Frame) -> "ServerHello":
        return cls(frame.id, frame.name, *json.loads(bytes(frame.body)))


def part_frame(part: Part, *, by_reference: bool) -> Frame:
    """Return the frame of a part. by_reference: within one process, where tensors need not become bytes."""
    key, dtype_number = part.key, _NUMBERS[part.dtype]
    body = _PART.pack(key.sequence, key.part, part.urgency, dtype_number, part.is_compressed, part.numel)
    buffers = part.tensors if by_reference else [_bytes_of(tensor) for tensor in part.tensors]
    return Frame(frames.CHANNEL_DATA, 0, key.name, body, buffers)


def part_of(frame: Frame, compression: Compression | None) -> Part:
    """Return the part of a frame. compression: of parts that are compressed."""
    sequence, number, urgency, dtype_number, is_compressed, numel = _PART.unpack(frame.body)
    dtype = _DTYPES[dtype_number]
    dtypes = [dtype] * len(frame.buffers)
    if is_compressed:
        assert compression is not None, "all members have the same options"
        dtypes = compression.dtypes(dtype)
    tensors = [_tensor_of(buffer, one) for buffer, one in zip(frame.buffers, dtypes, strict=True)]
    return Part(PartKey(frame.name, sequence, number), numel, dtype, tensors, bool(is_compressed), urgency)


def is_summed_by_servers(dtype: torch.dtype) -> bool:
    """Return whether servers take tensors of this dtype."""
    return dtype in _NUMBERS


def begin(connection: Connection, on_frame: OnFrame, on_close: OnClose) -> None:
    """Begin to read the connection, in this process's one reading thread where that is possible."""
    if isinstance(connection, PulledConnection) and has_epoll():
        connection.attach(on_frame, on_close)
        eager.watch(connection, lambda: None)
    else:
        connection.start(on_frame, on_close)


def _bytes_of(tensor: Tensor) -> Any:
    flat = tensor.view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs have no Buffer in 3.11


def _tensor_of(buffer: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(buffer, Tensor):
        return buffer
    if not len(buffer):
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype)
