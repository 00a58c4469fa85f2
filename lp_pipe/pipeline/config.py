"""The configuration of a pipeline's workers. Data only; needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.layers.model import Loss, LossWeight, OptimizerFactory, SchedulerFactory
from lp_pipe.pipeline.layers.model_names import ModelNames
from lp_pipe.pipeline.schedule import Schedule, replicated, verify
from lp_pipe.pipeline.schedule.channels import Channels, ScheduleEdge
from lp_pipe.pipeline.schedule.registry import Registered, adopt
from lp_pipe.pipeline.schedule.updates import Timing, Updates


@dataclass(frozen=True)
class Ranks:
    """The processes of a pipeline: every stage worker's replicas, numbered worker by worker.

    `replicas[w]` is how many processes worker w's stages run on.

    workers    0    1    2
    replicas   2    1    2
    ranks     0 1   2   3 4
    """

    replicas: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return sum(self.replicas)

    @property
    def places(self) -> list[tuple[int, int]]:
        """The (worker, replica) of each rank."""
        return [(worker, replica) for worker, count in enumerate(self.replicas) for replica in range(count)]

    def of(self, worker: int) -> range:
        """Return the ranks of a worker's replicas."""
        first = sum(self.replicas[:worker])
        return range(first, first + self.replicas[worker])

    def for_microbatch(self, worker: int, microbatch: int) -> int:
        """Return the rank of the replica that runs a micro-batch."""
        ranks = self.of(worker)
        return ranks[microbatch % len(ranks)]

    @property
    def firsts(self) -> list[int]:
        """The rank of each worker's replica 0, which represents all of them."""
        return [self.of(worker)[0] for worker in range(len(self.replicas))]

    def routes(self, channels: Channels, channel: int) -> list[tuple[int, int]]:
        """Return the pairs of ranks (sender, receiver) between which a channel's messages travel.

        Those of micro-batch j travel from replica j mod r to replica j mod s. Weights go to every replica of the
        receiver.
        """
        ends = channels.sender(channel), channels.receiver(channel)
        sending, receiving = (self.replicas[worker] for worker in ends)
        turns = receiving if channels.is_per_step(channel) else lcm(sending, receiving)
        return [(self.for_microbatch(ends[0], turn), self.for_microbatch(ends[1], turn)) for turn in range(turns)]


@dataclass(frozen=True)
class PipelineConfig:
    """The configuration that is the same for all workers. `placement[v]` is the worker of virtual stage v."""

    placement: tuple[int, ...]
    schedule: str | Schedule  # a name can be made again, for other numbers of micro-batches
    chunks: int
    microbatches: int
    loss: Loss
    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None
    loss_weight: LossWeight
    seed: int
    channel: str
    credits: int
    clip_grad_norm: float | None
    names: ModelNames
    recompute: Any
    precision: str
    tied: tuple[tuple[str, ...], ...]  # by the names inside, all names of each parameter that has several
    edges: tuple[ScheduleEdge, ...]
    shared_buffers: Mapping[str, str]  # that stages share; each with the error for a write to it
    replicas: tuple[int, ...]  # of each worker
    devices: tuple[str, ...]  # of each worker, as the user named it
    updates: Updates | None  # of an asynchronous schedule
    on_nan: str
    checks: str  # when rules that watch steps are on, see worker.rules
    predicted_seconds: tuple[float, ...]  # of each worker, by a plan: per micro-batch of one replica
    batch_dims: tuple[Any, Any, int]  # of input, target and output, see batch_dims.marked
    has_batch_dims: bool  # whether the model sets batch_dims
    callbacks: Mapping[int, Callable[[dict[str, Any]], Any]]  # by the step before which it is called
    zero: int  # what the replicas of a worker divide among themselves, see worker.parameter_shards
    is_offloaded: bool  # whether the optimizer's state of a stage on a GPU is in the host's memory
    registered: Registered | None  # of a schedule that only the launching process may have registered

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages update at different times, so that they are at different versions of the weights."""
        return self.updates is not None

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The update timing of each stage of an asynchronous schedule."""
        return self.updates.timings(self.replicas) if self.updates is not None else ()

    @property
    def channels(self) -> Channels:
        """The channels between the virtual stages; each worker numbers them alike."""
        return Channels(self.placement, self.edges)

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.replicas)

    @property
    def holders(self) -> list[int]:
        """The ranks that together have all of the state: one replica of each worker, or all where these divide it."""
        return list(range(self.ranks.world_size)) if self.zero else self.ranks.firsts

    @property
    def shares_weights(self) -> bool:
        """Whether a stage borrows parameters of another one."""
        return any(edge.kind == "tied weights" for edge in self.edges)

    @property
    def forward_only(self) -> bool:
        """Whether the pipeline evaluates, and does not train."""
        return self.schedule_for(self.microbatches).forward_only

    @property
    def last_stage(self) -> int:
        """The virtual stage that computes the loss."""
        return len(self.placement) - 1

    @property
    def workers(self) -> int:
        """The number of workers, each with its replicas."""
        return max(self.placement) + 1

    def schedule_for(self, microbatches: int) -> Schedule:
        """Return the schedule for a batch that split into so many micro-batches (small batches give fewer).

        Raises:
            ScheduleError: the schedule was given for another number, or a user's function makes a wrong one for this
                number.
        """
        if isinstance(self.schedule, str):
            if self.registered is None:
                return _made(self.schedule, self.replicas, microbatches, self.chunks, usual=self.microbatches)
            return _users(self, self.schedule, self.registered, microbatches)
        if microbatches != self.schedule.microbatches:
            raise ScheduleError(
                f"schedule {self.schedule.name!r} is written for {self.schedule.microbatches} micro-batches, but this "
                f"batch splits into {microbatches}: give larger batches, or name a schedule instead"
            )
        return self.schedule


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of one worker.

    sources: for each of its virtual stages the first layer's index, and the layers' sources.
    owners: by index, the sources of other stages' layers that decide the initial values of tied parameters.
    """

    rank: int
    sources: Mapping[int, tuple[int, Sequence[Any]]]
    owners: Mapping[int, Any]


def _users(config: PipelineConfig, name: str, registered: Registered, microbatches: int) -> Schedule:
    """Return a schedule made by a user's function; add_pipeline has verified it for a whole batch only."""
    adopt(name, registered)
    made = _proven(registered, name, config.replicas, microbatches, config.chunks, config.credits, config.edges)
    if made.placement != config.placement:
        raise ScheduleError(
            f"schedule {name!r} has its stages on workers {made.placement} with microbatches={microbatches}, and on "
            f"{config.placement} with microbatches={config.microbatches}: give each stage the same worker"
        )
    return made


@cache
def _proven(
    registered: Registered,
    name: str,
    replicas: tuple[int, ...],
    microbatches: int,
    chunks: int,
    credits: int,
    edges: tuple[ScheduleEdge, ...],
) -> Schedule:
    """Return a verified schedule.

    registered: part of the cache's key: another function may be registered later under the same name.
    """
    made = replicated(name, replicas, microbatches, chunks)
    verify(made, credits=credits // 2, edges=edges)
    return made


@cache
def _made(name: str, replicas: tuple[int, ...], microbatches: int, chunks: int, usual: int) -> Schedule:
    try:
        return replicated(name, replicas, microbatches, chunks)
    except ScheduleError:  # it does not exist for so few micro-batches (dualpipev), but a batch may have any size
        return replicated(name, replicas, usual, chunks).first_microbatches(microbatches)
