import json

from lp_pipe.pipeline.schedule import Costs, make_schedule, simulate, to_trace_events

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
