"""The search's own picture of a schedule agrees with the simulator's and with the proof's."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lp_pipe.pipeline.schedule import Schedule, make_schedule, simulate, verify
from lp_pipe.pipeline.schedule.auto import improve, join_backwards
from lp_pipe.pipeline.schedule.costs import Costs
from lp_pipe.pipeline.schedule.greedy import OrderPolicy, list_schedule
from lp_pipe.pipeline.schedule.orders import (
    FORWARD,
    INPUTS,
    OPS,
    OrderingProblem,
    is_sound,
    makespan,
    split,
    start_times,
    to_schedule,
    token,
)

STAGE_SECONDS = {"F": 1.0, "I": 1.5, "W": 0.5, "B": 2.0}
COSTS = Costs(forward=1.0, backward_input=1.5, backward_weight=0.5)


def problem(
    placement: tuple[int, ...], microbatches: int, limit: int | None = None, delay: float = 0.0
) -> OrderingProblem:
    stages, workers = len(placement), max(placement) + 1
    crosses = [one != other for one, other in pairwise(placement)]
    return OrderingProblem(
        placement=placement,
        microbatches=microbatches,
        durations=tuple(STAGE_SECONDS[op] for _ in range(stages) for op in OPS),
        delays=tuple(delay * crossing for crossing in crosses),
        limits=(limit or stages * microbatches,) * workers,
        credits=4,
    )


def seconds(problem: OrderingProblem, orders: list[list[int]]) -> float:
    starts = start_times(problem, orders)
    assert starts is not None
    return makespan(problem, orders, starts)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv", "interleaved", "dualpipev"])
def test_actions_start_when_the_simulator_starts_them(name: str) -> None:
    whole = make_schedule(name, 3, 6)
    parts = to_schedule(name, split(whole))
    timeline = simulate(parts, COSTS, links=0.25)
    starts = start_times(problem(whole.placement, 6, delay=0.25), split(whole))
    assert starts == [[span.start_s for span in spans] for spans in timeline.spans]
    assert timeline.makespan <= simulate(whole, COSTS, links=0.25).makespan


def test_orders_that_wait_for_each_other_or_fill_a_channel_have_no_times() -> None:
    stuck = Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1")
    assert start_times(problem((0, 1), 2), split(stuck)) is None
    full = make_schedule("looped_bfs", 2, 12)
    assert start_times(problem(full.placement, 12), split(full)) is None
    assert start_times(replace(problem(full.placement, 12), credits=12), split(full)) is not None


def test_a_worker_may_not_run_a_backward_early_or_stash_too_much() -> None:
    order = split(make_schedule("gpipe", 1, 3))[0]
    assert is_sound(order, limit=3)
    assert not is_sound(order, limit=2)
    assert not is_sound([token(INPUTS, 0), token(FORWARD, 0)], limit=3)


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2, 0, 1, 2)])
@pytest.mark.parametrize("slack", [0, 1, 5])
@pytest.mark.parametrize("preferred", [FORWARD, INPUTS])
def test_list_schedules_are_whole_within_limits_and_need_four_credits(
    placement: tuple[int, ...], slack: int, preferred: int
) -> None:
    limit = len(placement) // (max(placement) + 1) + slack
    asked = problem(placement, 9, limit)
    policy = OrderPolicy(caps=asked.limits, after_forward=preferred, after_backward=preferred, frees_memory=bool(slack))
    verify(to_schedule("greedy", list_schedule(asked, policy)), credits=4, memory=limit)


def test_moves_shorten_a_poor_order_and_repeat_themselves() -> None:
    asked = problem((0, 1, 2), 6)
    poor = split(make_schedule("gpipe", 3, 6))
    improved = improve(asked, poor, steps=300)
    assert seconds(asked, improved) < seconds(asked, poor)
    assert improved == improve(asked, poor, steps=300)
    verify(to_schedule("improved", improved), credits=4)


def test_backwards_become_whole_only_where_nobody_waits() -> None:
    asked = problem((0, 1), 3)
    parts = split(make_schedule("1f1b", 2, 3))
    joined = join_backwards(asked, parts, tries=100)
    assert seconds(asked, joined) == seconds(asked, parts)
    assert all(action.op in "FB" for action in to_schedule("joined", joined).workers[0])  # the first one sends nothing
    assert sum(map(len, joined)) < sum(map(len, parts))
