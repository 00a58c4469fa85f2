"""A transport in one process: the sender's copies of the tensors pass by reference.

Copying makes threads behave like processes: a layer that writes to its input in place must not change what the stage
before it has saved for its backward.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lp_pipe.channels.base import TransportReceiver, TransportSender
from lp_pipe.channels.packing import Layout, copies


class ReferenceSender(TransportSender):
    def keeps_on_gpu(self) -> bool:
        return True

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        return 0, copies(layout, tensors)


class ReferenceReceiver(TransportReceiver):
    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        return buffers

    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        return list(parcel)
