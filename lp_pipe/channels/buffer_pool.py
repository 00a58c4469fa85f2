"""A pool of memory for tensors: fresh pages cost ten times the copy into them."""

import mmap
import sys
import threading

import torch
from torch import Tensor

from lp_pipe.channels.base import NoRoomError
from lp_pipe.channels.packing import TensorSpec, empty_tensor, tensor_over
from lp_pipe.connections.memory import fresh_memory
from lp_pipe.connections.resource_limits import describe_error

_LARGE_BYTES = 1 << 20  # malloc itself reuses smaller ones
_IDLE_REFERENCES = 3  # the list of blocks, the loop's variable, and getrefcount's argument


class BufferPool:
    """Makes empty tensors; large ones reuse the memory of earlier ones that are gone, with all their views.

    It keeps as much memory as its tensors once needed at the same time, until other sizes are asked for.
    """

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def empty(self, spec: TensorSpec) -> Tensor:
        """Return an empty tensor.

        Raises:
            NoRoomError: there is no memory for it.
        """
        size = spec.size_bytes
        if size < _LARGE_BYTES:
            return empty_tensor(spec)
        with self._lock:
            # The tensor's storage refers to the block as long as any tensor uses it, which shows whether it is idle.
            return tensor_over(torch.frombuffer(self._idle_block(size), dtype=torch.uint8), 0, spec)

    def _idle_block(self, size: int) -> mmap.mmap:
        in_use = []
        for block in self._blocks:
            is_idle = sys.getrefcount(block) == _IDLE_REFERENCES
            if is_idle and len(block) == size:
                return block
            if not is_idle:
                in_use.append(block)
        # Idle blocks of other sizes belong to shapes that are not sent any more.
        self._blocks = in_use
        try:
            self._blocks.append(fresh_memory(size))
        except OSError as error:
            raise NoRoomError(error.errno, f"cannot allocate {size} bytes: {describe_error(error)}") from error
        return self._blocks[-1]
