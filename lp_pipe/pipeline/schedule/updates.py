"""The updates of asynchronous pipelines: when a stage changes its weights, and how old those of a forward are.

Micro-batches fall into groups, of which each brings one update. A forward of group q uses the weights after q - delay
updates (the first ones, until there were so many), and its backward the same. That is counted from the first step of
the training on, so that numbers depend neither on timing nor on whether the pipeline ran empty between two steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Literal, NamedTuple

from lp_pipe.errors import ScheduleError


class Timing(NamedTuple):
    """The update rule of one stage.

    every: micro-batches per update, over all replicas. delay: updates that a forward's weights are behind those that a
    single process would use. in_flight: forwards of one replica that may wait for their backwards.
    """

    every: int
    delay: int
    in_flight: int


@dataclass(frozen=True)
class Updates:
    """The rule of an asynchronous schedule.

    coalesced: one update for as many micro-batches as the pipeline holds, with weights that are one update old on every
        stage, so that two versions are enough (PipeDream-2BW, Narayanan et al., 2021, section 3.1). Else every stage
        updates after each round of its replicas, and keeps the weights of each forward for its backward: weight
        stashing (PipeDream, Narayanan et al., 2019, section 3.3).
    vertical_sync: a micro-batch uses weights of the same age on all stages, those that the first one has (ibid.).
    """

    coalesced: bool = False
    vertical_sync: bool = False

    def timings(self, replicas: Sequence[int]) -> tuple[Timing, ...]:
        """Return the timing of each stage, for stages with so many replicas.

        Raises:
            ScheduleError: vertical sync of stages that update at different times.
        """
        held = in_flight(replicas)
        each = [-(-count // own) for count, own in zip(held, replicas, strict=True)]
        if self.coalesced:
            return tuple(Timing(held[0], int(held[0] > 1), count) for count in each)
        if self.vertical_sync and len(set(replicas)) > 1:
            raise ScheduleError(
                f"vertical sync with replicas={tuple(replicas)}: these stages update after different numbers of "
                "micro-batches: give all the same number of replicas"
            )
        delays = [each[0] - 1 if self.vertical_sync else count - 1 for count in each]
        return tuple(map(Timing, replicas, delays, each))


class Turn(NamedTuple):
    """The next action of a replica: "F" or "B" of a micro-batch, or "U", a group's update after its last backward.

    group: within the step. ahead: it belongs to the next step, and that step's groups count on from this one's.
    """

    op: Literal["F", "B", "U"]
    microbatch: int
    group: int
    ahead: bool = False


def turns(
    timing: Timing, replica: int, replicas: int, microbatches: int, *, forwarded: int = 0, ahead: int = 0
) -> Iterator[Turn]:
    """Yield one step of a replica that keeps the pipeline full.

    The step has its backwards and updates, and forwards of the next step.
    forwarded: how many of its forwards the step before has done. ahead: the next step's micro-batches, 0 to run empty.
    """
    every, delay, limit = timing
    groups = -(-microbatches // every)
    own = range(replica, microbatches, replicas)
    forwards = [Turn("F", j, j // every) for j in own]
    forwards += [Turn("F", j, groups + j // every, ahead=True) for j in range(replica, ahead, replicas)]
    updated = 0
    for position, microbatch in enumerate(own):
        wanted = min(position + limit, len(forwards))
        while forwarded < wanted and forwards[forwarded].group - delay <= updated:
            yield forwards[forwarded]
            forwarded += 1
        yield Turn("B", microbatch, microbatch // every)
        following = microbatch + replicas
        done = following // every if following < microbatches else groups
        for group in range(updated, done):
            yield Turn("U", microbatch, group)
        updated = done
    for group in range(updated, groups):  # the last micro-batches of these groups are on other replicas
        yield Turn("U", replica, group)


def may_overlap(timings: Sequence[Timing], replicas: Sequence[int], microbatches: int, following: int) -> bool:
    """Return whether a step may be followed by another one without running empty in between.

    Where stages have different numbers of replicas, only if no update of either step is of a smaller group: a stage
    with one would wait for the next step's forwards, which an earlier stage does after an update that waits for it.
    """
    if len(set(replicas)) <= 1:
        return True
    whole = lcm(*replicas, *(timing.every for timing in timings))
    return microbatches % whole == 0 == following % whole


def in_flight(replicas: Sequence[int]) -> list[int]:
    """Return the micro-batches between forward and backward that keep a stage and all replicas behind it busy.

    Source: PipeDream (Narayanan et al., 2019), section 3.2, NOAM and 1F1B-RR.
    """
    behind = list(accumulate(reversed(replicas)))[::-1]  # replicas of a stage and of all after it
    wanted = [-(-total // own) * own for total, own in zip(behind, replicas, strict=True)]
    # A stage that waited for more than the one before it sends would wait for ever.
    return list(accumulate(wanted, min))
