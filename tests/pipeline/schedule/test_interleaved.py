import pytest

from lp_pipe.pipeline.schedule import Costs, make_schedule, simulate, verify
from lp_pipe.pipeline.schedule.interleaved import cut_into_rounds

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)


def test_a_round_goes_through_all_chunks_before_the_next_round() -> None:
    assert make_schedule("interleaved", stages=2, microbatches=4, chunks=2).to_csv().splitlines() == [
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3",
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3",
    ]


@pytest.mark.parametrize(
    ("stages", "microbatches", "sizes"),
    [(4, 8, [4, 4]), (4, 10, [5, 5]), (4, 3, [3]), (4, 11, [6, 5]), (3, 14, [4, 4, 3, 3])],
)
def test_rounds_have_at_least_a_micro_batch_per_worker_and_shrink(
    stages: int, microbatches: int, sizes: list[int]
) -> None:
    rounds = cut_into_rounds(stages, microbatches)
    assert [len(members) for members in rounds] == sizes
    assert [microbatch for members in rounds for microbatch in members] == list(range(microbatches))


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_any_number_of_microbatches_keeps_the_papers_bubble(p: int, chunks: int) -> None:
    """(p - 1) / (v m + p - 1), from one micro-batch per worker on (p workers, v chunks, m micro-batches)."""
    for m in range(p, 3 * p + 2):
        timeline = simulate(make_schedule("interleaved", p, m, chunks), EQUAL)
        assert timeline.bubble == pytest.approx((p - 1) / (chunks * m + p - 1)), m


def test_one_message_in_flight_is_enough_when_stages_divides_microbatches() -> None:
    verify(make_schedule("interleaved", stages=4, microbatches=12, chunks=3), credits=1)
