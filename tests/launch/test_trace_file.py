"""A trace file has nested spans on one clock, arrows for transfers, and a predicted timeline; its size is limited."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lp_pipe.launch import trace_file
from lp_pipe.launch.trace_file import TraceFile
from lp_pipe.telemetry.tracing import TraceBatch, TraceSpan

BEGAN = 1000.0


def compute(name: str, stage: int, microbatch: int, start: float, seconds: float = 1.0) -> TraceSpan:
    args = {"stage": stage, "microbatch": microbatch, "step": 3}
    return TraceSpan(name, "compute", 7, BEGAN + start, BEGAN + start + seconds, args)


def transfer(name: str, start: float, end: float, flow: str) -> TraceSpan:
    return TraceSpan(name, "transfer", 7, BEGAN + start, BEGAN + end, {}, flow)


def step(start: float, end: float, number: int = 3) -> TraceSpan:
    return TraceSpan("step", "step", 8, BEGAN + start, BEGAN + end, {"step": number})


STAGE_0 = [
    compute("forward", 0, 0, 0.1),
    transfer("send", 1.1, 1.2, "a>stages/1#1"),
    compute("forward", 0, 1, 1.5),
    transfer("send", 2.5, 2.6, "a>stages/1#2"),
    compute("backward", 0, 0, 6.0),
    compute("backward", 0, 1, 9.0),
    step(0.05, 10.5),
]
STAGE_1 = [
    transfer("receive", 0.1, 1.3, "a>stages/1#1"),
    compute("forward", 1, 0, 1.5),
    transfer("receive", 2.5, 2.7, "a>stages/1#2"),
    compute("forward", 1, 1, 3.0),
    compute("backward", 1, 0, 4.0),
    compute("backward", 1, 1, 7.0),
]
THREADS = {7: "compute", 8: "pipeline operations"}


def events_of(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    assert isinstance(found, list)
    return found


# By phase: the keys that an event must have, and those that it may have.
KEYS = {
    "X": ({"ph", "name", "cat", "pid", "tid", "ts", "dur"}, {"args"}),
    "s": ({"ph", "name", "cat", "pid", "tid", "ts", "id"}, set()),
    "f": ({"ph", "name", "cat", "pid", "tid", "ts", "id", "bp"}, set()),
    "C": ({"ph", "name", "pid", "ts", "args"}, set()),
    "M": ({"ph", "name", "pid", "tid", "args"}, set()),
}


def check_format(path: Path) -> list[dict[str, Any]]:
    """Check a file against the "Trace Event Format" and what ui.perfetto.dev makes of it; return its events."""
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] in ("ms", "ns") and set(found) == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = found["traceEvents"]
    named: dict[str, set[Any]] = {"process_name": set(), "thread_name": set()}
    for event in events:
        required, optional = KEYS[event["ph"]]
        assert required <= set(event) <= required | optional, event
        assert isinstance(event["pid"], int) and isinstance(event.get("tid", 0), int), event
        assert all(isinstance(event[key], str) for key in ("name", "cat", "bp") if key in event), event
        assert all(isinstance(event[key], int | float) and event[key] >= 0 for key in ("ts", "dur") if key in event)
        if event["ph"] == "M":
            place = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            assert place not in named[event["name"]] and isinstance(event["args"]["name"], str), event
            named[event["name"]].add(place)
        else:
            assert event["pid"] in named["process_name"], event  # a name comes before the first event
            assert "tid" not in event or (event["pid"], event["tid"]) in named["thread_name"], event
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
    check_nesting(events)
    check_arrows(events)
    return events


def check_arrows(events: list[dict[str, Any]]) -> None:
    """Check that each arrow has a beginning and a later end, each inside of a span of its track, and its own number."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    ends: dict[str, dict[int, float]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert isinstance(event["id"], int) and event["id"] not in ends[event["ph"]], event
            ends[event["ph"]][event["id"]] = event["ts"]
            assert any(start <= event["ts"] <= end for start, end in tracks[event["pid"], event["tid"]]), event
    assert list(ends["s"]) == list(ends["f"]) == sorted(ends["s"])
    assert all(when <= ends["f"][number] for number, when in ends["s"].items())


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Check that two spans of a track are apart, or one is inside of the other, in whole nanoseconds."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            tracks[event["pid"], event["tid"]].append((start, -(start + length)))
    for spans in tracks.values():
        open_ends: list[int] = []
        for start, negative_end in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or -negative_end <= open_ends[-1]
            open_ends.append(-negative_end)


def test_a_node_is_a_process_and_a_transfer_an_arrow(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", BEGAN)
    file.add("stages/0", TraceBatch(STAGE_0, THREADS))
    file.add("stages/1", TraceBatch([one._replace(start=one.start - 5, end=one.end - 5) for one in STAGE_1], {}), 5.0)
    assert file.num_steps == 1
    file.close()
    events = check_format(tmp_path / "trace.json")
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert sorted(names.values()) == ["predicted", "stages/0", "stages/1"]
    forward = [one for one in events if one["ph"] == "X" and one["name"] == "forward" and one["cat"] == "compute"]
    assert [(names[one["pid"]], one["ts"], one["dur"]) for one in forward] == [
        ("stages/0", 0.1e6, 1e6),
        ("stages/0", 1.5e6, 1e6),
        ("stages/1", 1.5e6, 1e6),  # its host's clock is 5 s behind
        ("stages/1", 3.0e6, 1e6),
    ]
    assert forward[1]["args"] == {"stage": 0, "microbatch": 1, "step": 3}
    arrows = [(one["ph"], one["id"], names[one["pid"]]) for one in events if one["name"] == "transfer"]
    assert arrows == [("s", 1, "stages/0"), ("f", 1, "stages/1"), ("s", 2, "stages/0"), ("f", 2, "stages/1")]
    stashed = [one["args"]["microbatches"] for one in events if one["ph"] == "C" and names[one["pid"]] == "stages/0"]
    assert stashed == [1, 2, 1, 0]


def test_an_arrow_of_which_one_end_is_not_in_the_trace_is_left_out(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", BEGAN)
    file.add("b/0", TraceBatch([transfer("receive", 0, 1, "x#1"), transfer("receive", 1, 3, "x#2")], {}))
    file.add("a/0", TraceBatch([transfer("send", 1, 2, "x#2"), transfer("send", 4, 5, "x#3")], {}))
    file.close()
    events = check_format(tmp_path / "trace.json")
    assert [one["ph"] for one in events if "id" in one] == ["s", "f"]


def test_the_predicted_timeline_has_the_same_actions_without_delays(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", BEGAN)
    file.add("stages/0", TraceBatch(STAGE_0, THREADS))
    file.add("stages/1", TraceBatch(STAGE_1, THREADS))
    file.close()
    spans = [one for one in events_of(tmp_path / "trace.json") if one.get("cat") == "predicted"]
    rows = [[(one["name"], one["ts"] / 1e6 - 0.05) for one in spans if one["tid"] == worker] for worker in (0, 1)]
    assert [[name for name, _ in row] for row in rows] == [["forward"] * 2 + ["backward"] * 2] * 2
    assert [[round(start, 3) for _, start in row] for row in rows] == [[0, 1, 4, 5], [1, 2, 3, 4]]
    assert len({one["args"]["step"] for one in spans}) == 1


def test_steps_that_overlap_or_had_begun_before_are_shown_and_not_counted(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", BEGAN)
    file.add("a/0", TraceBatch([step(-1, 1, 0), step(0.5, 2, 1), step(1.5, 3, 2)], {}))
    assert file.num_steps == 2
    file.close()
    check_format(tmp_path / "trace.json")


def test_a_file_that_is_full_is_valid_and_says_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "_MOST_BYTES", 1_010_000)
    file = TraceFile(tmp_path / "trace.json", BEGAN)
    for _ in range(20):
        file.add("stages/0", TraceBatch(STAGE_0, THREADS, num_lost=1))
    file.close()
    assert file.num_left_out > 20
    assert 9_000 < (tmp_path / "trace.json").stat().st_size < 1_010_000
    check_format(tmp_path / "trace.json")
