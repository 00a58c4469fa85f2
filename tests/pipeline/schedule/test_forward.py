import pytest
from hypothesis import given
from hypothesis import strategies as st

from lp_pipe.pipeline.schedule import Costs, forward_on, make_schedule, simulate, verify
from lp_pipe.pipeline.schedule.channels import ScheduleEdge

FORWARD = Costs(forward=1, backward_input=0, backward_weight=0)


def test_forwards_alone() -> None:
    schedule = make_schedule("forward", stages=2, microbatches=3)
    assert schedule.to_csv() == "0F0,0F1,0F2\n1F0,1F1,1F2\n"
    assert schedule.forward_only


def test_chunks_take_turns_by_rounds_of_micro_batches() -> None:
    assert make_schedule("forward", stages=2, microbatches=4, chunks=2).to_csv().splitlines() == [
        "0F0,0F1,2F0,2F1,0F2,0F3,2F2,2F3",
        "1F0,1F1,3F0,3F1,1F2,1F3,3F2,3F3",
    ]


def test_the_order_for_stages_in_a_v() -> None:
    """ZBV and DualPipeV give worker w the stages w and 2p - 1 - w; evaluation has to follow."""
    schedule = forward_on([0, 1, 1, 0], microbatches=4)
    assert schedule.to_csv().splitlines() == [
        "0F0,0F1,0F2,0F3,3F0,3F1,3F2,3F3",
        "1F0,1F1,2F0,2F1,1F2,1F3,2F2,2F3",
    ]
    verify(schedule)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 3), (3, 7), (4, 11)])  # workers, micro-batches
def test_no_worker_idles_but_at_the_ends_and_one_message_in_flight_is_enough(p: int, m: int, chunks: int) -> None:
    schedule = make_schedule("forward", p, m, chunks)
    assert simulate(schedule, FORWARD).makespan == m * chunks + p - 1
    verify(schedule, credits=1)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 4, 2), (3, 8, 2), (4, 3, 3)])
def test_the_forwards_of_interleaved_in_the_same_order(stages: int, microbatches: int, chunks: int) -> None:
    trained = make_schedule("interleaved", stages, microbatches, chunks)
    forwards = tuple(tuple(action for action in actions if action.op == "F") for actions in trained.workers)
    assert make_schedule("forward", stages, microbatches, chunks).workers == forwards


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.data())
def test_credits_for_two_micro_batches_a_worker_are_enough_wherever_the_stages_are(
    wishes: list[int], data: st.DataObject
) -> None:
    """A worker with most of the stages was outrun by those before it, further and further, until skips were stuck."""
    workers = sorted(set(wishes))
    placement = [workers.index(wish) for wish in wishes]
    ends = st.lists(st.sampled_from(range(len(placement))), min_size=2, max_size=2, unique=True)
    skips = data.draw(st.lists(ends, max_size=3))
    edges = [ScheduleEdge("value", min(skip), max(skip), (str(name),)) for name, skip in enumerate(skips)]
    schedule = forward_on(placement, 12 * len(workers))
    verify(schedule, credits=2 * len(workers), edges=edges)
