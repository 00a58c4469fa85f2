"""The gradients of a model, in buckets that servers sum, each as soon as its last gradient is there."""

import time
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lp_pipe.collectives.push_pull import PendingSum
from lp_pipe.data_parallel.buckets import Bucket, GradientBuckets, event_now
from lp_pipe.data_parallel.exchange import Exchange
from lp_pipe.data_parallel.late_updates import LateSum
from lp_pipe.errors import DataParallelError
from lp_pipe.training.device import empty_on_host


class ServedBuckets(GradientBuckets):
    """Buckets that need no common order: a server knows them by name, and front layers overtake the others.

    is_late: returns whether a parameter still has to be updated with the sum of an earlier step.
    """

    has_flags_apart = True

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        exchange: Exchange,
        bucket_bytes: int,
        extra_flags: Callable[[], Sequence[float]],
        is_late: Callable[[Tensor], bool],
    ) -> None:
        assert exchange.push_pull is not None
        self._is_late = is_late
        self._servers = exchange.push_pull
        self._sums: dict[int, PendingSum] = {}  # of this step, by the bucket's number
        self._before: dict[int, PendingSum] = {}  # of the step before, which may come during this one
        super().__init__(named_parameters, exchange, min(bucket_bytes, self._servers.partition_bytes), extra_flags)
        hosted = exchange.counts[exchange.rank]
        self._on_host = {  # copies of slots that are on a GPU, by the bucket's number
            bucket.number: empty_on_host(bucket.slots[:hosted])
            for bucket in self._buckets
            if bucket.slots.device.type != "cpu"
        }
        # Of the parameters, not a count: workers that have joined later have not made the same buckets before.
        layout = repr([(name, list(parameter.shape)) for name, parameter in named_parameters])
        self._prefix = f"gradients {zlib.crc32(layout.encode()):08x}"
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
        self._before, self._sums = self._sums, {}

    def open_window(self, *, sends_early: bool) -> None:
        self._window = {}
        self._sends_early = sends_early

    def drain(self) -> None:
        """Do nothing: sums by servers have no order among the other collectives."""

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

    def finish_late(self) -> list[LateSum]:
        """Begin the sums that are left, and wait for the flags only; return the sums. No parameter has a `.grad` then.

        Raises: as `finish`.
        """
        self._take_rest()
        self._begin_rest()
        flags = self._buckets[-1]
        flags.total = self._sums[flags.number].wait()
        present = self._flags[: len(self._parameters)].real.tolist()
        found = []
        for bucket in self._buckets[:-1]:
            pending = self._sums[bucket.number]
            gradients = {
                self._parameters[index]: self._placed(bucket.slots[0], bucket, index)
                for index in bucket.places
                if present[index]
            }
            found.append(LateSum(pending, gradients))
        for parameter in self._parameters:
            parameter.grad = None
        return found

    def _take(self, index: int, parameter: Tensor) -> None:
        if self._is_late(parameter):
            raise DataParallelError(
                f"{self._names[index]!r} got a gradient before it was updated with the last step's sum, because it was "
                "not read through its module: read it there in each step, or use dp.Servers(priority=False)"
            )
        self._wait_for_last(self._bucket_of[index])
        super()._take(index, parameter)

    def _wait_for_last(self, bucket: Bucket) -> None:
        """Wait for the bucket's sum of the step before, where no parameter's update has: it would come over gradients.

        So it is for gradients of a parameter that had none in that step.
        """
        before = self._before.pop(bucket.number, None)
        if before is not None:
            before.wait()

    def _begin_rest(self) -> None:
        for bucket in self._buckets:
            if bucket.number not in self._sums:
                self._begin(bucket)

    def _sum_rest(self) -> None:
        self._begin_rest()
        for bucket in reversed(self._buckets):
            began = time.monotonic()
            bucket.total = self._sums[bucket.number].wait()
            self._note_sum(bucket, began)

    @torch.no_grad()
    def _begin(self, bucket: Bucket) -> None:
        """Push a bucket that is complete. Front layers, whose gradients come last, are the most urgent."""
        self._wait_for_last(bucket)
        self._complete(bucket)
        own, number = bucket.slots[: self._exchange.counts[self._exchange.rank]], bucket.number
        copied = destination = None
        if number in self._on_host:
            bucket.filled, destination = event_now(own.device), own[0]
            with self._stream_of(bucket):
                own = self._on_host[number].copy_(own, non_blocking=True)
                copied = event_now(destination.device)
        self._sums[number] = self._servers.begin(
            f"{self._prefix} {number}",
            list(own),
            own[0],
            -number,
            self._turns[number],
            compresses=bucket is not self._buckets[-1],
            filled=copied,
            destination=destination,
        )
