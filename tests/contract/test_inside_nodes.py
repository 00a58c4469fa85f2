"""The contract's section on what nodes may ask, in every mode."""

import concurrent.futures
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp

WITHIN_S = 20.0


def run_nodes(mode: str, *nodes: lp.Node[Any], **options: Any) -> lp.Run:
    program = lp.Program("inside")
    with program.group("nodes"):
        for node in nodes:
            program.add_node(node)
    run = lp.launch(program, mode, **options)
    run.wait(30)
    return run


@pytest.mark.parametrize(
    "ask",
    [
        lp.stop,
        lp.stop_event,
        lambda: lp.wait_for_stop(0),
        lambda: lp.register_stop_handler(print),
        lambda: lp.unregister_stop_handler(print),
        lp.context,
        lambda: lp.log_metrics({"x": 1}),
    ],
)
def test_outside_of_nodes_they_raise(ask: Any) -> None:
    with pytest.raises(RuntimeError):
        ask()


def test_they_raise_in_the_launcher_of_a_running_program_too(mode: str) -> None:
    program = lp.Program("inside")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    with lp.launch(program, mode):
        for ask in (lp.stop, lp.stop_event, lp.context, lp.wait_for_stop, lambda: lp.log_metrics({"x": 1})):
            with pytest.raises(RuntimeError):
                ask()


def test_context_says_who_one_is_in_every_thread_of_the_node(mode: str, tmp_path: Path) -> None:
    def look() -> None:
        def me() -> tuple[Any, ...]:
            node = lp.context()
            return node.label, node.index, node.group_size, str(node.run_dir), node.is_stopping

        seen = [me()]
        threads = [threading.Thread(target=lambda: seen.append(me())), threading.Timer(0.01, lambda: seen.append(me()))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(me).result())
        nested = threading.Thread(target=lambda: run_in_thread(lambda: seen.append(me())))
        nested.start()
        nested.join()
        assert len(seen) == 5 and set(seen) == {("nodes", seen[0][1], 2, str(tmp_path.resolve()), False)}
        assert lp.context().resources.threads == 1 and lp.context().devices == ()

    run_nodes(mode, lp.PyNode(look), lp.PyNode(look), run_dir=tmp_path)


def run_in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_stop_reaches_everybody_from_constructors_and_handlers(mode: str) -> None:
    class Stops:
        def __init__(self, at_once: bool) -> None:
            if at_once:
                lp.stop()

        def now(self) -> str:
            lp.stop()
            return "answered"

    run_nodes(mode, lp.PyNode(lp.wait_for_stop), lp.CourierNode(Stops, True))
    program = lp.Program("stop")
    server = program.add_node(lp.CourierNode(Stops, False), label="server")
    program.add_node(lp.PyNode(lambda client: client.now() == "answered" or 1 / 0, server), label="caller")
    program.add_node(lp.PyNode(lambda: lp.stop_event().wait()), label="waits")
    lp.launch(program, mode).wait(30)


def test_wait_for_stop_says_whether_it_came(mode: str) -> None:
    def use() -> None:
        began = time.monotonic()
        assert lp.wait_for_stop(0.1) is False and lp.wait_for_stop(timeout=0) is False
        assert time.monotonic() - began < WITHIN_S
        assert not lp.stop_event().is_set() and isinstance(lp.stop_event(), threading.Event)
        lp.stop()
        assert lp.wait_for_stop() is True and lp.stop_event().is_set() and lp.context().is_stopping

    run_nodes(mode, lp.PyNode(use))


def test_stop_handlers_run_in_order_and_a_broken_one_blocks_nobody(mode: str, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def say(word: str) -> None:
        with log.open("a") as file:
            file.write(f"{word} {lp.context().label}\n")

    def use() -> None:
        def broken() -> None:
            say("broken")
            raise SystemExit(3)

        unwanted = lambda: say("unwanted")  # noqa: E731
        lp.register_stop_handler(lambda: say("first"))
        lp.register_stop_handler(unwanted)
        lp.register_stop_handler(broken)
        lp.register_stop_handler(lambda: time.sleep(0.3))
        lp.register_stop_handler(lambda: say("last"))
        lp.unregister_stop_handler(unwanted)
        lp.unregister_stop_handler(print)
        lp.stop()
        lp.wait_for_stop()
        lp.register_stop_handler(lambda: say("late"))

    run = run_nodes(mode, lp.PyNode(use))
    words = [line.split()[0] for line in log.read_text().splitlines()]
    assert [word for word in words if word != "late"] == ["first", "broken", "last"]
    assert words.count("late") == 1 and set(log.read_text().split()) <= {*words, "nodes"}
    assert run.status()["nodes"][0]["error"] is None


def test_metrics_go_to_a_file_in_the_runs_folder(mode: str, tmp_path: Path) -> None:
    # Names of the record's own fields took their places.
    values = {"time": 1.5, "node": 2, "step": 3, "values": 4, "": 5, "größe 日": float("inf"), "nan": float("nan")}
    run_nodes(mode, lp.PyNode(lambda: lp.log_metrics(values, step=7)), run_dir=tmp_path)
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert record.pop("time") > 1e9
    assert record == {"node": "nodes/0", "step": 7, "values": {**values, "größe 日": "inf", "nan": "nan"}}
