"""Batches from the feeder, asked for one step ahead, and whether two workers got the same ones."""

import zlib
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError, noting
from lp_pipe.pipeline.layers.microbatches import check_pair
from lp_pipe.private_torch import pytree
from lp_pipe.rpc.futures import read_by
from lp_pipe.training.tensor_archive import elements_of


class BatchSource:
    """Gets batches from a feeder's `batch(step)`; the next step's batch travels while this step computes."""

    def __init__(self, feeder: Any) -> None:
        self._feeder = feeder
        self._prefetched: tuple[int, Future[Any]] | None = None

    def get(self, step: int) -> tuple[Any, Any] | None:
        """Return the batch of a step, or None at the end of the data.

        Raises:
            PipelineError: the pipeline has no feeder, or the feeder returned something else than a pair.
        """
        if self._feeder is None:
            raise PipelineError("step() without a batch needs a feeder: add_pipeline(..., inputs=feeder_handle)")
        if self._prefetched and self._prefetched[0] == step:
            (_, future), self._prefetched = self._prefetched, None
        else:
            self.drop_prefetched()
            future = self._feeder.futures.batch(step)
        with noting(f"in the feeder's batch({step})"):
            batch = future.result()
        if batch is None:
            return None
        pair = check_pair(batch, f"the pipeline, from the feeder's batch({step}),")
        self._prefetched = (step + 1, read_by("thread", self._feeder).batch(step + 1))
        return pair

    def confirm_end(self, step: int) -> None:
        """Check that this worker, if it has asked for the step's batch, got None as the first stage did.

        Raises:
            PipelineError: the feeder gave a batch.
            Exception: the feeder's own.
        """
        if self._prefetched is None or self._prefetched[0] != step:
            return
        (_, future), self._prefetched = self._prefetched, None
        with noting(f"in the feeder's batch({step}), which has said None to the first stage"):
            batch = future.result()
        if batch is not None:
            raise PipelineError(
                f"the feeder gave the first stage None for step {step}, and another one a batch: batch(step) must be a "
                "pure function of the step"
            )

    def drop_prefetched(self) -> None:
        """Forget the next batch: the pipeline goes on from another step, perhaps because the feeder has died.

        A call that still waits for the feeder to be up is never sent: a feeder with a state has gone back by then, and
        would draw a batch that nothing uses.
        """
        if self._prefetched is not None:
            self._prefetched[1].cancel()
            self._prefetched = None


_NUMBERS = 64  # of each tensor: a step has time for that, whatever a target's size


def target_checksum(target: Any) -> int:
    """Return a checksum of the shapes and of some numbers; equal for equal targets.

    The target is checked, not the input: samples that are drawn twice from `next(iterator)` have different targets,
    while inputs that are augmented at random, each time anew, keep theirs.
    """
    found = 0
    for leaf in pytree.tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
            found = zlib.crc32(_some_numbers(leaf.detach()), zlib.crc32(repr(tuple(leaf.shape)).encode(), found))
    return found


def _some_numbers(tensor: Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    # An odd distance: an even one would pick numbers of a single column of an image.
    some = flat[:: len(flat) // _NUMBERS | 1]
    return elements_of(some.resolve_conj().resolve_neg().contiguous())
