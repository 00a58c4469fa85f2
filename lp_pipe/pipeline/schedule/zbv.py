"""Schedule "zbv": two stages a worker in a V, and backwards in two parts, so that workers are not idle in between."""

from collections.abc import Sequence

from lp_pipe.pipeline.schedule.ir import Schedule
from lp_pipe.pipeline.schedule.registry import register_schedule
from lp_pipe.pipeline.schedule.v_shape import Step, legs, numbered


@register_schedule("zbv", default_chunks=2, fixed_chunks=True)
def zbv(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order the handcrafted ZB-V: worker w has stages w and 2p - 1 - w (p workers).

        worker 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2     |
        worker 1 |    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2 |

    With F = I = W the only bubble is the p - 1 seconds of filling, from 2p - 1 micro-batches on; with fewer, the order
    is that of 2p - 1 without those that do not exist. A worker stashes at most 2p activations of its two half-sized
    stages: 1F1B's peak.
    Source: Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 6; Pipeline Parallelism with Controllable Memory
    (Qi et al., 2024); the order is torch.distributed.pipelining's.

    Raises:
        ScheduleError: stages or microbatches is below 1, or chunks is not 2.
    """
    return Schedule(
        "zbv", tuple(numbered(_worker(stages, worker, microbatches), microbatches) for worker in range(stages))
    )


def _worker(p: int, w: int, microbatches: int) -> Sequence[Step]:
    m = max(2 * p - 1, microbatches)  # with fewer the phases would not fit together
    down, up = legs(p, w)
    return [
        # warmup
        *[down.forward] * (2 * (p - w) - 1),
        *[up.forward, down.forward] * w,
        *[up.forward, up.inputs, up.weights] * (p - w),
        # steady
        *[down.forward, down.inputs, down.weights, up.forward, up.inputs, up.weights] * (m - (2 * p - 1 - w)),
        *[down.inputs, down.weights, up.forward, up.inputs, up.weights] * (p - 1 - w),
        # cooldown
        *[down.inputs, up.inputs] * w,
        *[down.inputs, down.weights] * (p - w),
        *[up.weights] * w,
        *[down.weights] * w,
    ]
