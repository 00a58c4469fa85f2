"""Whether a forward computes the same in a second call, which is all that a graph of it can do.

What it keeps in attributes (a list of hidden states, a generator of its own, a dict that counts) the graph has as it
was at the split, in every call. Neither the graph nor the attributes tell: many a module keeps there what it never
reads again, such as its attention, for plots.
"""

import contextlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.build import copied
from lp_pipe.pipeline.layers.rng import step_rng
from lp_pipe.private_torch import buffers_of, put_buffer, pytree

_SAMPLES = 2  # of the example, which may be large
_Example = tuple[tuple[Any, ...], dict[str, Any]]


def is_same_again(module: nn.Module, example: _Example) -> bool:
    """Call a copy of the module twice, with the same parameters, buffers and draws; in the mode that it is in.

    True also where that cannot be told.
    """
    tensors = [*module.parameters(), *module.buffers(), *_tensors_in(example)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return True  # a meta device computes nothing, and kernels of GPUs may add in any order
    # An example may be of the right sizes only, with words that there are not; and a module may have no copies.
    with contextlib.suppress(Exception):
        (twin,) = copied([module])
        buffers = [(inner, dict(buffers_of(inner))) for inner in twin.modules()]
        values = [(buffer, buffer.clone()) for buffer in twin.buffers()]
        first = _results(twin, example)
        for inner, present in buffers:
            for name, buffer in present.items():
                put_buffer(inner, name, buffer)
        for tensor, value in [*values, *zip(twin.parameters(), module.parameters(), strict=True)]:
            tensor.data.copy_(value)
        again = _results(twin, example)
        return len(first) == len(again) and all(map(_are_close, first, again))
    return True


def refusal(module: nn.Module) -> PipelineError:
    """Where it is not."""
    return PipelineError(
        f"{type(module).__name__} cannot be split: forward computes something else when it is called again with the "
        "same input, by what it keeps beside parameters and buffers (an attribute, a list, a generator of its own), "
        "and torch.export would write down its first call, for all steps: make it a buffer that forward writes to, "
        "draw by torch (torch.rand), or write the layers by hand"
    )


def _results(module: nn.Module, example: _Example) -> list[Tensor]:
    """What it returns, and what it has written to buffers."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: (tensor[:_SAMPLES] if tensor.dim() else tensor).detach().clone(), example
    )
    with torch.no_grad(), step_rng(0, 0, 0, 0), _others_as_before():
        output = module(*args, **kwargs)
    return [tensor.clone() for tensor in [*_tensors_in(output), *module.buffers()]]


@contextmanager
def _others_as_before() -> Iterator[None]:
    """Who draws from these is told so where it is traced."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _are_close(first: Tensor, second: Tensor) -> bool:
    """As threads leave them, which may add in any order."""
    one, other = (x.to_dense() if x.layout is not torch.strided else x for x in (first, second))
    if one.dtype == other.dtype and torch.equal(one, other):
        return True  # before any wide copies: the logits of a long text may be a large part of the memory
    one, other = one.to(torch.complex128), other.to(torch.complex128)
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
