"""The gradients of a model, in buckets that are summed over all replicas while the last backward goes on.

A worker keeps one gradient for each replica that it hosts, in a slot of the bucket. The parameters' `.grad` are views
of the slot of the replica whose turn it is, so a complete gradient is already in the memory that the workers share.

    buckets      [ g5 g4 ]  [ g3 g2 g1 ]  [ g0 flags ]      in reverse order of the parameters, as backwards reach them

The flags are numbers behind the last bucket that are summed with it: how many workers have a gradient of each
parameter, and what else all workers must know before they update. So a step needs no other exchange.

Where the optimizer's state is sharded, a worker gets the sum of its shard of each bucket only, and the flags are a
bucket of their own. After the update the bucket's memory carries the new parameters to the other workers.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lp_pipe.data_parallel.exchange import Exchange
from lp_pipe.data_parallel.gradient_sums import BucketSum, GradientSums
from lp_pipe.errors import DataParallelError
from lp_pipe.telemetry import tracing, waits
from lp_pipe.training.state_shards import OwnShard, flat, is_dense

_LINE_BYTES = 64


@dataclass
class Bucket:
    number: int
    slots: Tensor
    places: dict[int, tuple[int, int]]  # by number of the parameter: where its gradient begins, and where it ends
    views: list[dict[int, Tensor]]  # by slot
    scratch: tuple[Tensor, Tensor, Tensor] | None
    pending: int = 0  # parameters whose gradient is not complete
    total: Tensor = field(default_factory=lambda: torch.empty(0))
    filled: torch.Event | None = None  # on a GPU: the gradients are complete
    added: torch.Event | None = None  # on a GPU: the sum is made, if it was in the thread


class GradientBuckets(GradientSums):
    """The buckets of an optimizer's parameters, with the hooks that fill them and the thread that sums them.

    extra_flags: returns this worker's other flags; called once a step, when the last bucket is complete.
    is_sharded: a worker gets the sums of its own shards only, see `own_shards`.
    """

    has_flags_apart: ClassVar[bool] = False  # whether the flags are a bucket of their own

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        exchange: Exchange,
        bucket_bytes: int,
        extra_flags: Callable[[], Sequence[float]],
        *,
        is_sharded: bool = False,
    ) -> None:
        self._is_sharded = is_sharded
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._exchange = exchange
        self._extra_flags = extra_flags
        self._flags_at = 0  # in the last bucket
        self._num_extra = len(extra_flags())
        self._present: list[float] = []  # how many workers have a gradient of each parameter
        self._slot = 0
        self._fired: list[set[int]] = [set() for _ in range(exchange.slots)]  # parameters with a gradient, by slot
        self._window: dict[int, int] | None = None  # backwards in the window by parameter; None: it is not open
        self._expected: dict[int, int] | None = None  # the same of the step before; None: not known
        self._sends_early = False
        self._is_after_window = False
        self._changed = threading.Condition()
        self._ready = 0  # so many buckets may be summed
        self._summed = 0
        self._sums_of_step: list[BucketSum] = []
        self._is_busy = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._buckets = self._layout(bucket_bytes)
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.places}
        self._hooks = [self._hooked(index, parameter) for index, parameter in enumerate(self._parameters)]

    @property
    def count(self) -> int:
        """The number of buckets, which is that of the exchanges of a step."""
        return len(self._buckets)

    @property
    def sums(self) -> Sequence[BucketSum]:
        return self._sums_of_step

    @property
    def summed(self) -> int:
        """The number of buckets of this step that are summed."""
        return self._summed

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        for fired in self._fired:
            fired.clear()
        self._slot, self._window, self._sends_early, self._is_after_window = 0, None, False, False
        self._ready = self._summed = 0
        self._sums_of_step = []
        for bucket in self._buckets:
            bucket.pending = len(bucket.places)
            bucket.filled = bucket.added = None

    def select(self, slot: int, *, is_last: bool) -> None:
        """Let the next backwards add to the gradient of another hosted replica.

        Raises:
            DataParallelError: buckets of this step were summed already.
        """
        if self._sends_early:
            raise DataParallelError(
                "replica.shards() was called more often in this step than in the step before, so some gradients were "
                "summed too early: call it equally often in all steps"
            )
        self._slot, self._window, self._is_after_window = slot, None, False
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._view(index) if index in self._fired[slot] else None

    def open_window(self, *, sends_early: bool) -> None:
        """Note that this worker's last shard of a batch begins, if it has one.

        sends_early: the same on all workers: gradients may be summed as soon as they have had as many backwards as in
            the step before.
        """
        self._window = {}
        self._sends_early = sends_early and self._exchange.backend is not None
        if self._sends_early and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradient buckets", daemon=True)
            self._thread.start()

    def close_window(self) -> None:
        """Note that the last shard of a batch has ended."""
        self._is_after_window = True

    def drain(self) -> None:
        """Sum all buckets before another collective of the step: all workers must call them in the same order.

        A collective in the forward of the last shard finds no gradient: then nothing is summed before the optimizer's
        step. The workers that have no shard do not call it.
        """
        if self._sends_early and (self._window or self._is_after_window):
            self._sum_rest()
        else:
            self._sends_early = False

    def finish(self) -> None:
        """Sum what is left. Then each parameter's `.grad` is the sum, or None if no replica has a gradient.

        Where sums are sharded, `.grad` is None, and `shard_gradients` has them.

        Raises:
            GenerationOver: a worker is gone.
        """
        self._take_rest()
        self._sum_rest()
        self._present = self._flags[: len(self._parameters)].real.tolist()
        for index, parameter in enumerate(self._parameters):
            bucket = self._bucket_of[index]
            is_whole = self._present[index] and not self._is_sharded
            parameter.grad = self._placed(bucket.total, bucket, index) if is_whole else None

    def _take_rest(self) -> None:
        """Take what the user has set or deleted by hand."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                self._fired[self._slot].discard(index)
            else:
                self._take(index, parameter)

    def clip(self, max_norm: float) -> None:
        """Scale the gradients, as torch does in one process."""
        assert not self._is_sharded, "the norm has torch's bits only of whole gradients"
        nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def own_shards(self, parameters: Iterable[nn.Parameter], rank: int | None = None) -> dict[nn.Parameter, OwnShard]:
        """Return the shards that lie in this worker's parts of the buckets; rank: in those of another worker.

        Those of frozen parameters, which are in no bucket, keep the optimizer's state that they have.
        """
        indices = {parameter: index for index, parameter in enumerate(self._parameters)}
        workers, rank = len(self._exchange.counts), self._exchange.rank if rank is None else rank
        found = {}
        for parameter in parameters:
            begin, end = (parameter.numel() * place // workers for place in (rank, rank + 1))
            if parameter in indices:
                begin, end, _ = self._range_of(indices[parameter], rank)
            found[parameter] = OwnShard(flat(parameter)[begin:end], begin)
        return found

    def shard_gradients(self, rank: int | None = None) -> dict[nn.Parameter, Tensor]:
        """Return the sums of this worker's shards, of the parameters that have gradients; `finish` comes before.

        rank: of another worker, whose shards are asked for, where this one has whole sums.
        """
        assert rank is None or not self._is_sharded, "no worker has others' sums"
        found: dict[nn.Parameter, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            begin, end, at = self._range_of(index, self._exchange.rank if rank is None else rank)
            if self._present[index] and end > begin:
                total = self._bucket_of[index].total
                if self._is_sharded:
                    found[parameter] = total[at : at + end - begin]
                else:
                    found[parameter] = total[self._bucket_of[index].places[index][0] :][begin:end]
        return found

    @torch.no_grad()
    def share_updates(self) -> None:
        """Give all workers the parameters of which this one and others have updated their shards."""
        if self._exchange.backend is None:
            return
        for bucket in self._buckets:
            if not any(self._present[index] for index in bucket.places):
                continue
            whole = bucket.slots[0]
            own = self._exchange.shard_of(whole)
            for index in bucket.places:
                begin, end, at = self._range_of(index, self._exchange.rank)
                own[at : at + end - begin] = flat(self._parameters[index])[begin:end]
            self._exchange.backend.all_gather(whole, own)
            for index, (first, last) in bucket.places.items():
                flat(self._parameters[index]).copy_(whole[first:last])

    def _range_of(self, index: int, rank: int) -> tuple[int, int, int]:
        """Return which of the parameter's elements are a worker's, and where in its shard they begin."""
        bucket = self._bucket_of[index]
        size = bucket.slots.shape[1] // len(self._exchange.counts)
        first = rank * size
        begin, end = bucket.places[index]
        low, high = max(begin, first), min(end, first + size)
        return (low - begin, high - begin, low - first) if low < high else (0, 0, 0)

    def learn(self) -> None:
        """Note how many backwards the last shard of this step had, for the sums during the next step's."""
        self._expected = self._window or None

    @property
    def extra_flags(self) -> list[float]:
        """The sums of the workers' other flags."""
        found: list[float] = self._flags[len(self._parameters) :][: self._num_extra].real.tolist()
        return found

    @property
    def fires_in_window(self) -> int:
        """The number of gradients since the last shard began."""
        return sum((self._window or {}).values())

    def close(self) -> None:
        """Remove the hooks, end the thread, and let go of the memory."""
        for hook in self._hooks:
            hook.remove()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def _flags(self) -> Tensor:
        return self._buckets[-1].total[self._flags_at :]

    def _layout(self, bucket_bytes: int) -> list[Bucket]:
        """Return the buckets: parameters of one dtype and device, the last ones first."""
        found: list[tuple[tuple[torch.dtype, torch.device], dict[int, tuple[int, int]], int]] = []
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in reversed(range(len(self._parameters))):
            parameter = self._parameters[index]
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(index)
        for kind, indices in by_kind.items():
            itemsize = kind[0].itemsize
            line = _LINE_BYTES // itemsize
            places: dict[int, tuple[int, int]] = {}
            end = 0
            for index in indices:
                numel = self._parameters[index].numel()
                if places and (end + numel) * itemsize > bucket_bytes:
                    found.append((kind, places, end))
                    places, end = {}, 0
                places[index] = end, end + numel
                end += -(-numel // line) * line
            found.append((kind, places, end))
        if self._is_sharded or self.has_flags_apart or not found:  # the flags alone
            found.append(((torch.float32, torch.device("cpu")), {}, 0))
        self._flags_at = found[-1][2]
        buckets = []
        for number, ((dtype, device), places, end) in enumerate(found):
            numel = end + (len(self._parameters) + self._num_extra if number == len(found) - 1 else 0)
            padded = self._exchange.padded(numel)
            slots = self._exchange.empty(self._exchange.slots * padded, dtype, device).zero_()
            bucket = Bucket(number, slots.view(self._exchange.slots, padded), places, [], None)
            is_sharded = self._is_sharded and number < len(found) - 1  # all workers need the whole flags
            bucket.scratch = self._exchange.scratch(bucket.slots, is_sharded=is_sharded)
            bucket.views = [{index: self._placed(slot, bucket, index) for index in places} for slot in bucket.slots]
            buckets.append(bucket)
        return buckets

    def _placed(self, memory: Tensor, bucket: Bucket, index: int) -> Tensor:
        """Return a parameter's part of a bucket's memory, with the parameter's strides."""
        parameter, (begin, end) = self._parameters[index], bucket.places[index]
        part = memory[begin:end]
        if parameter.is_contiguous() or not is_dense(parameter):
            return part.view(parameter.shape)
        return part.as_strided(parameter.size(), parameter.stride())

    def _view(self, index: int) -> Tensor:
        return self._bucket_of[index].views[self._slot][index]

    def _hooked(self, index: int, parameter: nn.Parameter) -> RemovableHandle:
        """Register a hook, also on a parameter that this worker has not thawed yet."""
        is_trained = parameter.requires_grad
        handle: RemovableHandle = parameter.requires_grad_().register_post_accumulate_grad_hook(self._hook_of(index))
        parameter.requires_grad_(is_trained)
        return handle

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        def gradient_is_added(parameter: Tensor) -> None:
            self._take(index, parameter)
            if self._window is not None:
                self._count(index, self._window)

        return gradient_is_added

    def _take(self, index: int, parameter: Tensor) -> None:
        """Put a parameter's gradient into the bucket, if it is not there."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise DataParallelError(
                f"the gradient of {self._names[index]!r} is sparse ({gradient.layout}), which replicas cannot sum: use "
                "nn.Embedding(sparse=False)"
            )
        if gradient is not self._view(index):
            with torch.no_grad():
                self._view(index).copy_(gradient)
            parameter.grad = self._view(index)
        self._fired[self._slot].add(index)

    def _count(self, index: int, window: dict[int, int]) -> None:
        window[index] = window.get(index, 0) + 1
        if not self._sends_early or self._expected is None:
            return
        expected = self._expected.get(index, 0)
        bucket = self._bucket_of[index]
        if bucket.number < max(self._ready, self._summed):
            raise self._too_late(index, expected, window[index])
        if window[index] == expected:
            bucket.pending -= 1
            if not bucket.pending:
                bucket.filled = event_now(bucket.slots.device)
                with self._changed:
                    while self._ready < len(self._buckets) and not self._buckets[self._ready].pending:
                        self._ready += 1
                    self._changed.notify_all()

    def _too_late(self, index: int, expected: int, count: int) -> DataParallelError:
        return DataParallelError(
            f"{self._names[index]!r} got a gradient after the gradients of this step were summed: its last shard has "
            f"had {expected} backwards in the step before, and has {count} now"
        )

    def _run(self) -> None:
        """Sum buckets in their order, as they get complete, in a thread of their own."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self._summed < self._ready and not self._error))
                if self._is_closed:
                    return
                self._is_busy = True
                bucket = self._buckets[self._summed]
            error: BaseException | None = None
            try:
                with self._stream_of(bucket):
                    self._timed_sum(bucket)
                    bucket.added = event_now(bucket.slots.device)
            except BaseException as caught:  # belongs to the thread that waits for the sums
                error = caught
            with self._changed:
                self._is_busy = False
                self._error = error
                self._summed += error is None
                self._changed.notify_all()

    def _sum_rest(self) -> None:
        with self._changed:
            self._ready = 0  # the thread takes no other bucket
            if self._is_busy:
                with waits.waiting(waits.RANKS, waits.Target(peer="other workers"), "the sum of gradients"):
                    self._changed.wait_for(lambda: not self._is_busy)
            error, self._error = self._error, None
        if error is not None:
            raise error
        for bucket in self._buckets[: self._summed]:
            if bucket.added is not None:
                torch.accelerator.current_stream(bucket.slots.device).wait_event(bucket.added)
        while self._summed < len(self._buckets):
            self._timed_sum(self._buckets[self._summed])
            self._summed += 1

    @contextlib.contextmanager
    def _stream_of(self, bucket: Bucket) -> Iterator[None]:
        """Work in the body after the bucket's gradients, and beside the backward, on a stream of this thread."""
        if bucket.filled is None:
            yield
            return
        device = bucket.slots.device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        with self._streams[device] as stream:
            stream.wait_event(bucket.filled)
            yield

    def _timed_sum(self, bucket: Bucket) -> None:
        began = time.monotonic()
        self._sum(bucket)
        self._note_sum(bucket, began)

    def _note_sum(self, bucket: Bucket, began: float) -> None:
        """Note that the sum of a bucket has ended, in a trace, too."""
        num_bytes, ended = bucket.slots[0].numel() * bucket.slots.dtype.itemsize, time.monotonic()
        self._sums_of_step.append(BucketSum(bucket.number, num_bytes, began, ended))
        recorder = tracing.recorder
        if recorder is not None:
            recorder.add("sum of gradients", tracing.TRANSFER, began, ended, bucket=bucket.number, bytes=num_bytes)

    @torch.no_grad()
    def _sum(self, bucket: Bucket) -> None:
        self._complete(bucket)
        is_shared = not self._is_sharded or bucket is self._buckets[-1]
        add = self._exchange.add if is_shared else self._exchange.add_shard
        bucket.total = add(bucket.slots, bucket.scratch)

    def _complete(self, bucket: Bucket) -> None:
        """Write into a bucket what no hook has: zeros of parameters without a gradient, and the flags."""
        for slot, views in enumerate(bucket.views[: self._exchange.counts[self._exchange.rank]]):
            for index, view in views.items():
                if index not in self._fired[slot]:
                    view.zero_()
        if bucket is self._buckets[-1]:
            every = set().union(*self._fired)
            flags = [float(index in every) for index in range(len(self._parameters))] + [*self._extra_flags()]
            bucket.slots[:, self._flags_at :].zero_()
            bucket.slots[0, self._flags_at : self._flags_at + len(flags)] = torch.tensor(flags, dtype=torch.float32)


def event_now(device: torch.device) -> torch.Event | None:
    """Return the event that the work which is queued on the current stream is done; None on the host."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
