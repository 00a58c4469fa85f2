"""Schedule "zb_h1": 1F1B in which backwards for the weights wait until a worker would be idle."""

from collections.abc import Iterable, Iterator, Sequence

from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.one_f_one_b import alternate
from lp_pipe.pipeline.schedule.registry import register_schedule


@register_schedule("zb_h1", fixed_chunks=True)
def zb_h1(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order 1F1B with split backwards: worker w runs the W of a micro-batch w backwards for inputs later.

        worker 0 |F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3 |
        worker 1 |   F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3 |
        worker 2 |      F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 |

    With W no longer than F and I the bubble is (p - 1)(F + I - W) seconds for p workers: a third of 1F1B's when the
    three are equal. A worker stashes at most p activations, 1F1B's peak.
    Source: Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 2.

    Raises:
        ScheduleError: stages or microbatches is below 1, or chunks is not 1.
    """
    return Schedule("zb_h1", tuple(_worker(stages, worker, microbatches) for worker in range(stages)))


def _worker(stages: int, worker: int, microbatches: int) -> tuple[Action, ...]:
    forwards, inputs, weights = (
        [Action(op, worker, microbatch) for microbatch in range(microbatches)] for op in ("F", "I", "W")
    )
    return tuple(_insert(weights, alternate(forwards, inputs, warmup=stages - 1 - worker), lag=worker))


def _insert(weights: Sequence[Action], actions: Iterable[Action], lag: int) -> Iterator[Action]:
    """Follow each I, from number `lag` on, by the next W; the others come at the end."""
    for action in actions:
        yield action
        if action.op == "I" and action.microbatch >= lag:
            yield weights[action.microbatch - lag]
    yield from weights[max(0, len(weights) - lag) :]
