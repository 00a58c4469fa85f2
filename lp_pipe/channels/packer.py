"""Packing one message after another: most are like the one before, and need no new layout."""

from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels import packing
from lp_pipe.channels.packing import CONSTANTS, Layout
from lp_pipe.rpc.tensor_memory import offset_in_line


class Packer:
    """`packing.pack` for the values of one channel; a value like the one before gets the very same Layout.

    Alike: the same tuples and lists, with the same constants and tensors of the same strides in the same places.
    """

    def __init__(self, *, carries_gpu: bool = False) -> None:
        self._carries_gpu = carries_gpu
        self._pattern: tuple[Any, ...] | None = None
        self._layout: Layout | None = None

    def pack(self, value: Any) -> tuple[Layout, list[Tensor]]:
        """As `packing.pack`.

        Raises:
            ValueError: a tensor that a channel cannot carry.
        """
        tensors: list[Tensor] = []
        pattern = self._pattern_of(value, tensors)
        if pattern is not None and pattern == self._pattern and self._layout is not None:
            return self._layout, tensors
        layout, tensors = packing.pack(value, carries_gpu=self._carries_gpu)
        if layout != self._layout:
            self._layout = layout
        # With a geometry the tensors that travel are not those of the value.
        self._pattern = None if layout.has_geometries else pattern
        assert self._layout is not None
        return self._layout, tensors

    def _pattern_of(self, value: Any, tensors: list[Tensor]) -> tuple[Any, ...] | None:
        """All that a value's layout depends on; its tensors are added to the list. None: something unusual is in it.

        Whether channels carry such tensors at all is seen when a pattern is new.
        """
        kind = type(value)
        if kind is Tensor:
            if value.layout is not torch.strided or value.is_nested:
                return None  # they have no strides
            if offset_in_line(value) or value.is_conj() or value.is_neg():
                return None  # they have a geometry
            tensors.append(value.detach() if value.requires_grad else value)
            return value.dtype, value.shape, value.stride(), value.device.type
        if kind is tuple or kind is list:
            parts = [self._pattern_of(part, tensors) for part in value]
            return None if None in parts else (kind, *parts)
        return (kind, value) if kind in CONSTANTS else None
