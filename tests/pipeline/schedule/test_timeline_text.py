import json

import pytest

from lp_pipe.pipeline.schedule import (
    Costs,
    Schedule,
    dualpipev,
    forward,
    gpipe,
    interleaved,
    looped_bfs,
    make_schedule,
    one_f_one_b,
    simulate,
    to_text,
    to_trace_events,
    zb_h1,
    zbv,
)

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)
NO_WEIGHTS = Costs(forward=1, backward_input=1, backward_weight=0)


def test_a_timeline_is_drawn_with_a_line_per_worker() -> None:
    assert to_text(simulate(make_schedule("1f1b", stages=3, microbatches=4), EQUAL)) == (
        "worker 0 |F0 F1 F2             B0--- F3 B1---    B2---    B3--- |\n"
        "worker 1 |   F0 F1       B0--- F2 B1--- F3 B2---    B3---       |\n"
        "worker 2 |      F0 B0--- F1 B1--- F2 B2--- F3 B3---             |\n"
        "18 s, bubble 33.3%, peak activations 3 2 1\n"
    )


@pytest.mark.parametrize(
    ("documented", "schedule", "costs"),
    [
        (gpipe, gpipe(3, 4, 1), NO_WEIGHTS),
        (one_f_one_b, one_f_one_b(3, 4, 1), NO_WEIGHTS),
        (interleaved, interleaved(2, 4, 2), NO_WEIGHTS),
        (looped_bfs, looped_bfs(2, 3, 2), NO_WEIGHTS),
        (forward, forward(2, 4, 2), NO_WEIGHTS),
        (zb_h1, zb_h1(3, 4, 1), EQUAL),
        (zbv, zbv(2, 3, 2), EQUAL),
        (dualpipev, dualpipev(2, 4, 2), EQUAL),
        (to_text, one_f_one_b(2, 2, 1), EQUAL),
    ],
)
def test_the_drawings_in_docstrings_are_right(documented: object, schedule: Schedule, costs: Costs) -> None:
    for line in to_text(simulate(schedule, costs)).splitlines()[:-1]:
        assert line in str(documented.__doc__)


def test_boxes_name_the_stage_where_workers_have_several() -> None:
    timeline = simulate(make_schedule("forward", stages=2, microbatches=2, chunks=2), EQUAL)
    assert to_text(timeline) == (
        "worker 0 |0F0 0F1 2F0 2F1     |\nworker 1 |    1F0 1F1 3F0 3F1 |\n5 s, bubble 20.0%, peak activations 0 0\n"
    )


def test_narrow_boxes_say_less() -> None:
    text = to_text(simulate(make_schedule("interleaved", stages=2, microbatches=6), EQUAL))
    assert text.splitlines()[1].startswith("worker 1 |  F F F 3B0 F 3B1 F 1B0 F")


def test_long_timelines_are_squeezed_into_100_columns() -> None:
    for microbatches in (1, 8, 100, 400):
        lines = to_text(simulate(make_schedule("1f1b", stages=12, microbatches=microbatches), EQUAL)).splitlines()
        assert len(lines) == 13
        assert len({len(line) for line in lines[:12]}) == 1
        assert max(map(len, lines[:12])) <= 100


def test_durations_need_not_be_multiples() -> None:
    costs = Costs(forward=[0.31, 0.5], backward_input=0.7, backward_weight=0.9)
    lines = to_text(simulate(make_schedule("1f1b", stages=2, microbatches=2), costs)).splitlines()
    assert lines[0].split()[:4] == ["worker", "0", "|F0", "F1"]
    assert len(lines[0]) == len(lines[1]) <= 100


def test_a_timeline_without_time_is_drawn() -> None:
    text = to_text(simulate(make_schedule("1f1b", 1, 1), Costs(forward=0, backward_input=0, backward_weight=0)))
    assert text == "worker 0 ||\n0 s, bubble 0.0%, peak activations 1\n"


MILLISECONDS = Costs(forward=1e-3, backward_input=1e-3, backward_weight=1e-3)


def test_a_schedule_is_a_process_and_a_worker_a_thread() -> None:
    timelines = {name: simulate(make_schedule(name, 2, 2), MILLISECONDS) for name in ("1f1b", "gpipe")}
    events = json.loads(to_trace_events(timelines))["traceEvents"]
    names = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"].endswith("_name")]
    assert names == [
        ("process_name", 0, 0, "1f1b"),
        ("thread_name", 0, 0, "worker 0"),
        ("thread_name", 0, 1, "worker 1"),
        ("process_name", 1, 0, "gpipe"),
        ("thread_name", 1, 0, "worker 0"),
        ("thread_name", 1, 1, "worker 1"),
    ]


def test_actions_have_their_times_in_microseconds() -> None:
    timeline = simulate(make_schedule("1f1b", 2, 2), MILLISECONDS)
    events = [e for e in json.loads(to_trace_events({"1f1b": timeline}))["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 8
    backward = next(event for event in events if event["name"] == "0B0")
    assert (round(backward["ts"]), round(backward["dur"])) == (4000, 2000)
    assert (backward["cat"], backward["args"]) == ("backward", {"stage": 0, "microbatch": 0})
