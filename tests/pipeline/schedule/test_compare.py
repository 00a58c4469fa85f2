import pytest

from lp_pipe.pipeline.schedule import Costs, Schedule, compare, make_schedule, simulate

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)


def test_schedules_are_ranked_by_makespan_for_the_same_model() -> None:
    """Two chunks a worker are half as large as one, in time and in what they stash."""
    ranked = compare(4, 8, EQUAL).ranked
    assert [party.timeline.makespan for party in ranked] == sorted(party.timeline.makespan for party in ranked)
    parties = {(party.name, party.chunks): party for party in ranked}
    zbv, ours = simulate(make_schedule("zbv", 4, 8), EQUAL), parties["zbv", 2]
    assert (ours.timeline.makespan, ours.peak_activations) == (zbv.makespan / 2, max(zbv.peak_activations) / 2)
    assert parties["1f1b", 1].timeline.makespan == 33
    assert parties["1f1b", 1].peak_activations == 4
    busy = {
        round(sum(span.end_s - span.start_s for row in party.timeline.spans for span in row), 9) for party in ranked
    }
    assert busy == {4 * 8 * 3}


def test_auto_is_compared_with_as_many_chunks_as_each_of_the_others() -> None:
    ranked = compare(2, 4, EQUAL, chunks=3).ranked
    assert {party.chunks for party in ranked if party.name == "auto"} == {1, 2, 3}
    for party in ranked:
        auto = next(other for other in ranked if other.name == "auto" and other.chunks == party.chunks)
        assert auto.timeline.makespan <= party.timeline.makespan


def test_what_is_left_out_is_named_with_the_reason() -> None:
    left_out = compare(4, 7, EQUAL, memory=4).left_out
    assert "use microbatches=8 or more" in left_out["dualpipev"]
    assert "it does less than the others" in left_out["forward"]
    assert "the limit is 4: the schedule needs 7" in left_out["gpipe"]
    assert "zbv" not in left_out  # 8 activations of half a stage


def test_too_little_memory_for_chunks_leaves_the_others() -> None:
    comparison = compare(2, 4, EQUAL, memory=1)
    assert {party.name for party in comparison.ranked} == {"auto"}


def test_a_schedule_from_a_file_may_take_part() -> None:
    mine = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1", "mine")
    last = compare(2, 2, EQUAL, more=[mine]).ranked[-1]
    assert (last.name, last.chunks, last.timeline.makespan) == ("mine", 1, 12)


def test_uneven_stages_are_cut_in_two() -> None:
    ranked = compare(2, 4, Costs(forward=[1, 3], backward_input=[1, 3], backward_weight=0)).ranked
    longest = max(ranked, key=lambda party: party.timeline.makespan)
    assert longest.timeline.makespan >= 4 * 6
    zbv = next(party for party in ranked if party.name == "zbv")
    first, second = (sum(end - start for _, start, end in row) for row in zbv.timeline.spans)
    assert first == pytest.approx(second)  # a V balances them: 1/2 + 3/2 on both workers
