"""What the conductor asks its workers for."""

from typing import Any, NamedTuple


class Wanted(NamedTuple):
    """What a step returns beside its loss and metrics."""

    outputs: bool = False
    input_grad: bool = False


NOTHING_MORE = Wanted()


class StepTask(NamedTuple):
    """One step of training. Asynchronous steps are asked for before the one before has ended, in the order of tags.

    given: the batch's input, for the first stage. target: for the last stage. None: ask the feeder. They are split by
    the workers, because memory that was split before it came there would lie at other addresses.
    target_checksum: at the feeder's target, for workers that ask for it, too.
    wanted: what the first and the last stage report beside loss and metrics.
    """

    tag: int
    step: int
    microbatches: int
    given: tuple[Any] | None = None
    target: tuple[Any] | None = None
    target_checksum: int | None = None
    wanted: Wanted = NOTHING_MORE
