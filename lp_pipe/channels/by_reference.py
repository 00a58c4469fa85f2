"""Transport in one process: the receiver gets the sender's tensors themselves."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lp_pipe.channels.packing import Layout
from lp_pipe.channels.transport import Inlet, Outlet


class ReferenceOutlet(Outlet):
    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        return 0, tensors


class ReferenceInlet(Inlet):
    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        return buffers

    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        return list(parcel)
