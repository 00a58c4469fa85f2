"""The base of what sums an optimizer's gradients over all replicas: of whole models, and of sharded ones."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lp_pipe.training.state_shards import OwnShard


@dataclass(frozen=True)
class BucketSum:
    """The sum of one bucket in a step: when it began and ended, by time.monotonic(), waits for others included."""

    number: int
    num_bytes: int
    began: float
    ended: float


class GradientSums(ABC):
    """The sums of the gradients of an optimizer's parameters, step after step. Used by the thread that runs `train`."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of exchanges of gradients in a step."""

    @property
    @abstractmethod
    def sums(self) -> Sequence[BucketSum]:
        """The sums of this step, with their times, as far as they are known."""

    @property
    @abstractmethod
    def fires_in_window(self) -> int:
        """The number of gradients since the last shard began, where these may be summed before the step."""

    @property
    @abstractmethod
    def extra_flags(self) -> list[float]:
        """The sums of the workers' other flags, which are not about gradients."""

    @abstractmethod
    def begin_step(self) -> None:
        """Forget the gradients of the step before."""

    @abstractmethod
    def select(self, slot: int, *, is_last: bool) -> None:
        """Let the next backwards add to the gradient of a hosted replica. is_last: no shard of it comes after."""

    @abstractmethod
    def open_window(self, *, sends_early: bool) -> None:
        """Note that this worker's last shard of a batch begins, if it has one.

        sends_early: the same on all workers: gradients may be summed before the step.
        """

    @abstractmethod
    def close_window(self) -> None:
        """Note that the last shard of a batch has ended."""

    @abstractmethod
    def drain(self) -> None:
        """Sum what may be summed already, before another collective of the step."""

    @abstractmethod
    def finish(self) -> None:
        """Sum what is left. Then each parameter's `.grad` is its sum, or `shard_gradients` has the own part of it.

        Raises:
            GenerationOver: a worker is gone.
        """

    @abstractmethod
    def learn(self) -> None:
        """Note what this step was like, for the next one."""

    @abstractmethod
    def clip(self, max_norm: float) -> None:
        """Scale the summed gradients so that their norm is at most `max_norm`."""

    @abstractmethod
    def own_shards(self, parameters: Iterable[nn.Parameter], rank: int | None = None) -> dict[nn.Parameter, OwnShard]:
        """Return the shard of each parameter that this worker updates; some are empty.

        rank: of another worker, whose shards are asked for.
        """

    @abstractmethod
    def shard_gradients(self, rank: int | None = None) -> dict[nn.Parameter, Tensor]:
        """Return the sums of this worker's shards, of the parameters that have gradients; `finish` comes before.

        rank: of another worker, whose shards are asked for, where this one has whole sums.
        """

    @abstractmethod
    def share_updates(self) -> None:
        """Give all workers the parameters of which this one and others have updated their shards."""

    @abstractmethod
    def close(self) -> None:
        """Remove the hooks from the parameters, and drop the gradients."""
