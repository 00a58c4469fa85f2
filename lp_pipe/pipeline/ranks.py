"""The processes of a pipeline: every stage worker's replicas, numbered worker by worker."""

from dataclasses import dataclass
from math import lcm

from lp_pipe.pipeline.schedule.channels import Channels


@dataclass(frozen=True)
class Ranks:
    """`replicas[w]` is how many processes worker w's stages run on.

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
        """(worker, replica) of each rank."""
        return [(worker, replica) for worker, count in enumerate(self.replicas) for replica in range(count)]

    def of(self, worker: int) -> range:
        """The ranks of a worker's replicas."""
        first = sum(self.replicas[:worker])
        return range(first, first + self.replicas[worker])

    def for_microbatch(self, worker: int, microbatch: int) -> int:
        """The rank of the replica that runs a micro-batch."""
        ranks = self.of(worker)
        return ranks[microbatch % len(ranks)]

    @property
    def firsts(self) -> list[int]:
        """The rank of each worker's replica 0, which speaks for all of them."""
        return [self.of(worker)[0] for worker in range(len(self.replicas))]

    def routes(self, channels: Channels, channel: int) -> list[tuple[int, int]]:
        """The pairs of ranks (sender, receiver) between which a channel's messages travel.

        Those of micro-batch j from replica j mod r to replica j mod s. Weights go to every replica of the receiver.
        """
        ends = channels.sender(channel), channels.receiver(channel)
        sending, receiving = (self.replicas[worker] for worker in ends)
        turns = receiving if channels.is_per_step(channel) else lcm(sending, receiving)
        return [(self.for_microbatch(ends[0], turn), self.for_microbatch(ends[1], turn)) for turn in range(turns)]
