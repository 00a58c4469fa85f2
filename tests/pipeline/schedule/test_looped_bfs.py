import pytest

from lp_pipe.pipeline.schedule import Costs, make_schedule, peak_activations, simulate


def test_all_micro_batches_of_a_chunk_before_the_next_chunk() -> None:
    assert make_schedule("looped_bfs", stages=2, microbatches=3, chunks=2).to_csv().splitlines() == [
        "0F0,0F1,0F2,2F0,2F1,2F2,2B0,2B1,2B2,0B0,0B1,0B2",
        "1F0,1F1,1F2,3F0,3F1,3F2,3B0,3B1,3B2,1B0,1B1,1B2",
    ]


def test_stages_are_dealt_out_in_turn() -> None:
    assert make_schedule("looped_bfs", stages=3, microbatches=1, chunks=2).placement == (0, 1, 2, 0, 1, 2)


def test_a_worker_stashes_everything() -> None:
    assert peak_activations(make_schedule("looped_bfs", stages=2, microbatches=3, chunks=2)) == (6, 6)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_shrink_the_bubble(chunks: int) -> None:
    p, m = 4, 8  # workers, micro-batches
    costs = Costs(forward=1, backward_input=1, backward_weight=1)
    timeline = simulate(make_schedule("looped_bfs", p, m, chunks), costs)
    assert timeline.bubble == pytest.approx((p - 1) / (chunks * m + p - 1))
