"""The shards of a batch: a micro-batch of a replica each, with its weight in the step's loss."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

from torch import nn

from lp_pipe.errors import DataParallelError, PipelineError
from lp_pipe.pipeline.layers.batch_dims import unmarked
from lp_pipe.pipeline.layers.microbatches import check_pair, loss_weights, split
from lp_pipe.pipeline.layers.model import LossWeight
from lp_pipe.private_torch import buffers_of
from lp_pipe.training.buffer_snapshot import set_buffer


class Shard(tuple[Any, Any, float]):
    """A micro-batch of a replica, as (input, target, weight).

    replica, microbatch: whose it is, and its number there.
    """

    replica: int
    microbatch: int

    def __new__(cls, input: Any, target: Any, weight: float, replica: int, microbatch: int) -> Self:
        made = super().__new__(cls, (input, target, weight))
        made.replica, made.microbatch = replica, microbatch
        return made

    @property
    def input(self) -> Any:
        return self[0]

    @property
    def target(self) -> Any:
        return self[1]

    @property
    def weight(self) -> float:
        return self[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self, self.replica, self.microbatch)


def cut_into_shards(batch: Any, replicas: int, microbatches: int, loss_weight: LossWeight) -> list[Shard]:
    """Return the shards of all replicas, in order; the weights add up to 1 over the batch (unless they are "one").

    Raises:
        DataParallelError: the batch cannot be cut.
    """
    try:
        value, target = check_pair(batch, "replica.shards()")
        parts = [
            (replica, microbatch, *pair)
            for replica, (inputs, targets) in enumerate(_pairs(value, target, replicas))
            for microbatch, pair in enumerate(_pairs(inputs, targets, microbatches))
        ]
        weights = loss_weights([target for *_, target in parts], loss_weight)
    except PipelineError as error:
        raise DataParallelError(str(error)) from error
    return [
        Shard(unmarked(value), unmarked(target), weight, replica, microbatch)
        for (replica, microbatch, value, target), weight in zip(parts, weights, strict=True)
    ]


def with_placeholders(shards: Sequence[Shard], hosted: range, slots: int, loss_weight: LossWeight) -> list[Shard]:
    """Return a worker's shards of a batch, with others of weight 0 behind them, so that all workers have equally many.

    Workers with a sharded model make the same forwards and backwards, since each of these has collectives.

    shards: of all replicas. hosted: the worker's replicas. slots: the number of replicas that a worker hosts at most.

    Raises:
        DataParallelError: placeholders are needed, and the loss is not multiplied by the weights.
    """
    of_replica: dict[int, list[Shard]] = {}
    for shard in shards:
        of_replica.setdefault(shard.replica, []).append(shard)
    most = max(map(len, of_replica.values()))
    if loss_weight == "one" and (len(of_replica) % slots or any(len(own) < most for own in of_replica.values())):
        counts = {replica: len(own) for replica, own in of_replica.items()}
        raise DataParallelError(
            f"replica.shards(loss_weight='one') of a sharded model: the replicas have {counts} micro-batches, and "
            "workers fill up with micro-batches of weight 0, which 'one' does not know: give batches that divide "
            "evenly, or loss_weight='samples'"
        )
    found: list[Shard] = []
    for replica in range(hosted.start, hosted.start + slots):
        own = of_replica.get(replica, []) if replica in hosted else []
        value, target, _ = shards[0]
        found += own
        found += [Shard(value, target, 0.0, replica, number) for number in range(len(own), most)]
    return found


def _pairs(value: Any, target: Any, parts: int) -> list[tuple[Any, Any]]:
    inputs, targets = split(value, parts), split(target, parts)
    if len(inputs) != len(targets):
        raise PipelineError(
            f"the input of a batch is cut into {len(inputs)} parts and its target into {len(targets)}: both need the "
            "same number of samples"
        )
    return list(zip(inputs, targets, strict=True))


class ReplicaBuffers:
    """The buffers of some modules, with the values that each hosted replica has given them in a step."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before: list[Any] | None = None  # at the step's beginning; None: no step has begun
        self._of_replica: dict[int, list[Any]] = {}  # of replicas whose turn is over
        self._current: int | None = None

    @property
    def count(self) -> int:
        """The number of buffers."""
        return len(self._places())

    def begin_step(self) -> None:
        """Note the values that all replicas begin the step with."""
        self._before, self._current = self.values(), None
        self._of_replica.clear()

    def select(self, replica: int) -> None:
        """Give the modules the buffers of a replica."""
        if replica == self._current or self._before is None:
            return
        if self._current is not None:
            self._of_replica[self._current] = self.values()
        self.put(self._of_replica.get(replica, self._before))
        self._current = replica

    def changed_by(self, replica: int) -> list[bool]:
        """Return, for each buffer, whether a replica has written to it in this step."""
        if self._before is None:
            return [False] * self.count
        if replica not in (self._current, *self._of_replica):
            return [False] * self.count
        own = self.values() if replica == self._current else self._of_replica[replica]
        return [not _is_same(value, before) for value, before in zip(own, self._before, strict=True)]

    def keep_only(self, replica: int) -> None:
        """Give the modules the buffers of a replica, or those of the step's beginning if it has none here."""
        if self._before is not None:
            own = self._of_replica.get(replica, self._before)
            self.put(self.values() if replica == self._current else own)
            self._current = replica

    def restore(self) -> None:
        """Give the modules the buffers of the step's beginning."""
        if self._before is not None:
            self.put(self._before)
            self._of_replica.clear()
            self._current = None

    def tensors(self) -> list[Any]:
        """Return the buffers themselves, in order."""
        return [buffers_of(module)[name] for module, name in self._places()]

    def values(self) -> list[Any]:
        """Return copies of the buffers, in order."""
        return [value if value is None else value.detach().clone() for value in self.tensors()]

    def put(self, values: Sequence[Any]) -> None:
        """Give the modules these buffers."""
        for (module, name), value in zip(self._places(), values, strict=True):
            if value is not None:
                set_buffer(module, name, value)

    def _places(self) -> list[tuple[nn.Module, str]]:
        return [(module, name) for module in self._modules for name in buffers_of(module)]


def _is_same(value: Any, before: Any) -> bool:
    if value is None or before is None:
        return value is before
    if (value.shape, value.dtype) != (before.shape, before.dtype):
        raise DataParallelError(
            f"a buffer has changed from {before.dtype} {tuple(before.shape)} to {value.dtype} {tuple(value.shape)} in "
            "a step: replicas need buffers of a fixed size"
        )
    # NaN is equal to NaN here: a buffer of NaN that nothing has written to has not changed.
    return bool(((value == before) | ((value != value) & (before != before))).all())


def hosted(shards: Sequence[Shard], replicas: range) -> Iterator[Shard]:
    """Yield the shards of some replicas."""
    return (shard for shard in shards if shard.replica in replicas)
