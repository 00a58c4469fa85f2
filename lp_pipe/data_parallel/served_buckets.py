"""The gradients of a model, in buckets that servers sum, each as soon as its last gradient is there."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lp_pipe.collectives.push_pull import PendingSum
from lp_pipe.data_parallel.buckets import Bucket, Exchange, GradientBuckets


class ServedBuckets(GradientBuckets):
    """Buckets that need no common order: a server knows them by name, and front layers overtake the others."""

    has_flags_apart = True

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        exchange: Exchange,
        bucket_bytes: int,
        extra_flags: Callable[[], Sequence[float]],
        *,
        is_sharded: bool = False,
    ) -> None:
        assert exchange.push_pull is not None and not is_sharded
        self._servers = exchange.push_pull
        self._sums: dict[int, PendingSum] = {}  # of this step, by the bucket's number
        super().__init__(named_parameters, exchange, min(bucket_bytes, self._servers.partition_bytes), extra_flags)
        self._prefix = self._servers.new_prefix()
        self._turns: list[int] = []  # of each bucket's first part
        turn = 0
        for bucket in self._buckets:
            self._turns.append(turn)
            turn += self._servers.parts_of(bucket.slots[0])

    @property
    def summed(self) -> int:
        return sum(one.is_complete for one in self._sums.values())

    def begin_step(self) -> None:
        super().begin_step()
        self._sums.clear()

    def open_window(self, *, sends_early: bool) -> None:
        self._window = {}
        self._sends_early = sends_early

    def drain(self) -> None:
        """Do nothing: sums by servers have no order among the other collectives."""

    def close(self) -> None:
        super().close()
        self._servers.forget(self._prefix)

    def _count(self, index: int, window: dict[int, int]) -> None:
        window[index] = window.get(index, 0) + 1
        if not self._sends_early or self._expected is None:
            return
        bucket, expected = self._bucket_of[index], self._expected.get(index, 0)
        if bucket.number in self._sums:
            raise self._too_late(index, expected, window[index])
        if window[index] == expected:
            bucket.pending -= 1
            if not bucket.pending:
                self._begin(bucket)

    def _sum_rest(self) -> None:
        for bucket in self._buckets:
            if bucket.number not in self._sums:
                self._begin(bucket)
        for bucket in reversed(self._buckets):
            bucket.total = self._sums[bucket.number].wait()

    @torch.no_grad()
    def _begin(self, bucket: Bucket) -> None:
        """Push a bucket that is complete. Front layers, whose gradients come last, are the most urgent."""
        self._complete(bucket)
        own = list(bucket.slots[: self._exchange.counts[self._exchange.rank]])
        number, is_flags = bucket.number, bucket is self._buckets[-1]
        self._sums[number] = self._servers.begin(
            f"{self._prefix} {number}", own, own[0], -number, self._turns[number], compresses=not is_flags
        )
