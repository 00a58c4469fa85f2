"""A live run streams its states, events, metrics, waits and traffic to those who watch, and does nothing otherwise."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch.run_records import entries

PATIENCE_S = 30.0


class Server:
    def slow(self) -> None:
        lp.wait_for_stop()

    def quick(self) -> int:
        return 1


def work(server: Any) -> None:
    step = 0
    while not lp.wait_for_stop(0.02):
        server.quick()
        step += 1
        lp.log_metrics({"loss": 1 / step}, step=step)


def stand(server: Any) -> None:
    server.slow()


def program() -> lp.Program:
    made = lp.Program("watched")
    server = made.add_node(lp.CourierNode(Server), label="server")
    made.add_node(lp.PyNode(work, server), label="worker")
    made.add_node(lp.PyNode(stand, server), label="waiter")
    return made


def first(messages: Iterator[dict[str, Any]], kind: str, **fields: Any) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    for message in messages:
        if message["kind"] == kind and all(message.get(name) == value for name, value in fields.items()):
            return message
        assert time.monotonic() < deadline
    raise AssertionError(f"no message {kind} {fields}")


def test_what_is_new_in_a_run_is_streamed(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_torch: None
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with lp.launch(program(), mode, run_dir=tmp_path / "run", listed=True) as run:
        (record,) = entries().values()
        control = lp.CourierClient(record.control, wait_for_ready=False)
        for messages in (run.watch(), control.watch()):
            states = first(messages, "states")["states"]
            assert set(states) == {"server/0", "worker/0", "waiter/0"}
            metrics = first(messages, "metrics", node="worker/0")
            assert metrics["values"]["loss"] == pytest.approx(1 / metrics["step"])
        waits: list[dict[str, Any]] = []
        edges: list[dict[str, Any]] = []
        while not waits or not any(edge["calls_per_s"] > 1 for edge in edges):
            live = first(messages, "live")
            waits, edges = live["waits"] or waits, live["edges"] or edges
        assert {(one["node"], one["waits_for"]) for one in waits} == {("waiter/0", "server/0")}
        (busy,) = [edge for edge in edges if edge["calls_per_s"] > 1]
        assert (busy["user"], busy["server"]) == ("worker/0", "server/0")
        past = run.watch(since=0)
        assert first(past, "event", event="start", node="worker/0")["pid"] > 0
        assert first(past, "metrics", step=1)["values"] == {"loss": 1.0}
    rest = list(messages)
    states = {name: row["state"] for message in rest for name, row in message.get("states", {}).items()}
    assert states == {"server/0": "stopped", "worker/0": "stopped", "waiter/0": "stopped"}
    assert [message["kind"] for message in rest].index("end") == len(rest) - 1
