"""Schedule "dualpipev": two stages a worker in a V, forwards of one beside backwards of the other."""

from collections.abc import Sequence
from itertools import chain

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.ir import Schedule
from lp_pipe.pipeline.schedule.registry import register_schedule
from lp_pipe.pipeline.schedule.v_shape import Leg, Step, legs, numbered


@register_schedule("dualpipev", default_chunks=2, fixed_chunks=True)
def dualpipev(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order DeepSeek's DualPipeV: worker w has stages w and 2p - 1 - w (p workers), and mostly full backwards.

        worker 0 |F0 F1 F2 F0 I0 W0 F1 F3 3B1-- F2 0B0-- 3B2-- F3    0B1-- 3B3-- I2 W2 I3 W3 |
        worker 1 |   F0 F0 F1 F1 F2 2B0-- F2 1B0-- F3 2B1-- F3 1B1-- 2B2-- 1B2-- I3 I3 W3 W3 |

    As fast as "zbv" when all costs are equal, and with one more activation; backwards are split only where a W fills a
    gap. Its point is that one stage's F and the other's B are neighbours, to be overlapped where their layers wait for
    communication of their own (experts on other devices); here they run one after the other.
    Source: DeepSeek-V3 (2024), section 3.2.1, and github.com/deepseek-ai/DualPipe; these are its steps 1 to 8.

    Raises:
        ScheduleError: stages is below 1, microbatches is below 2 * stages, or chunks is not 2.
    """
    if microbatches < 2 * stages:
        fewer = f", or stages={microbatches // 2} or fewer" if microbatches >= 2 else ""
        raise ScheduleError(
            f"schedule 'dualpipev' with stages={stages} and microbatches={microbatches}: it needs a micro-batch for "
            f"each of its {2 * stages} virtual stages: use microbatches={2 * stages} or more{fewer}"
        )
    workers = (numbered(_worker(stages, worker, microbatches), microbatches) for worker in range(stages))
    return Schedule("dualpipev", tuple(workers))


def _worker(p: int, w: int, m: int) -> Sequence[Step]:
    down, up = legs(p, w)
    rest = p - 1 - w
    last = _alternating(up, down, 2 * (w + 1))  # the backwards of step 6
    late = [*last[w + 1 :], *[down] * rest]  # legs that have their weights at the end, in this order
    weights = [leg.weights for leg in late]
    return [
        *[down.forward] * (2 * rest),  # 1
        *[down.forward, up.forward] * (w + 1),  # 2
        *[up.inputs, up.weights, up.forward] * rest,  # 3
        *[down.forward, up.backward, up.forward, down.backward] * (m - 2 * p + w + 1),  # 4
        *[up.backward, up.forward, down.backward] * rest,  # 5
        *[leg.backward for leg in last[: w + 1]],  # 6
        *[leg.inputs for leg in last[w + 1 :]],
        *chain.from_iterable((step, down.inputs) for step in weights[:rest]),  # 7
        *weights[rest:],  # 8
    ]


def _alternating(first: Leg, second: Leg, count: int) -> list[Leg]:
    return ([first, second] * count)[:count]
