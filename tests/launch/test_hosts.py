"""The contract of every kind of host: threads, processes, both at once, and agents."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.engines import make_engine
from lp_pipe.launch.host import Host
from lp_pipe.launch.hosts.host_join import MultiHostOptions
from lp_pipe.launch.launcher import MODES
from lp_pipe.launch.mixed import CompositeHost
from lp_pipe.launch.plan.launch_plan import make_plan
from lp_pipe.telemetry.metrics import MetricsLog
from tests.waiting import until

WITHIN_S = 20.0
KINDS = ("thread", "process", "mixed", "multi_host")

pytestmark = pytest.mark.usefixtures("no_leaks")


def beat(path: Path) -> None:
    print(f"{path.name} beats", flush=True)
    while not lp.wait_for_stop(0.02):
        with path.open("a") as file:
            file.write("x")


class Started(NamedTuple):
    kind: str
    host: Host
    coordinator: Coordinator
    beats: dict[str, Path]  # by node_id

    @property
    def pids(self) -> dict[str, int]:
        """Return the process ids of the nodes that are processes."""
        rows = {label: rows[0]["pid"] for label, rows in self.coordinator.status().items()}
        pids = {node_id: rows[node_id.partition("/")[0]] for node_id in self.beats}
        return {node_id: pid for node_id, pid in pids.items() if pid != os.getpid()}

    def is_beating(self, node_ids: Iterable[str]) -> bool:
        """Return whether each of the nodes goes on from where it is now."""
        sizes = {node_id: self.beats[node_id].stat().st_size for node_id in node_ids}
        until(lambda: all(self.beats[node_id].stat().st_size > size for node_id, size in sizes.items()))
        return True


@pytest.fixture(params=KINDS)
def started(request: Any, tmp_path: Path) -> Iterator[Started]:
    """A host of each kind with two nodes that run: "first" and "second", which is a process in a mixed host."""
    kind: str = request.param
    program = lp.Program("hosts")
    program.add_node(lp.PyNode(beat, tmp_path / "first"), label="first")
    second = lp.PyNode(beat, tmp_path / "second")
    program.add_node(lp.MultiProcessingColocation([second]) if kind == "mixed" else second, label="second")
    plan = make_plan(program, tmp_path / "run", 2.0)
    options = MultiHostOptions(make_engine("local", "2", {})) if kind == "multi_host" else None
    mode = "thread" if kind == "mixed" else kind
    metrics = MetricsLog(plan.folder.metrics, ())
    host, coordinator = MODES[mode](plan, metrics, options)
    beats = {spec.node_id: tmp_path / spec.label for spec in plan.nodes}
    host.start()
    until(lambda: all(path.exists() for path in beats.values()))
    yield Started(kind, host, coordinator, beats)
    coordinator.request_stop()
    assert coordinator.next_order() is None
    host.stop_nodes(beats)
    ended = coordinator.wait_for_end(list(beats), WITHIN_S)
    if not ended:
        host.kill(beats)
    host.close()
    metrics.close()
    assert ended


def test_a_suspended_host_stops_its_processes_until_it_resumes_them(started: Started) -> None:
    processes = [psutil.Process(pid) for pid in started.pids.values()]
    assert len(processes) == {"thread": 0, "process": 2, "mixed": 1, "multi_host": 2}[started.kind]
    resume = started.host.suspend()
    if started.kind == "multi_host":  # its agents would take the launcher for dead
        assert resume is None
    else:
        assert resume is not None
        until(lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes))
        assert started.is_beating(started.beats.keys() - started.pids.keys())  # threads stop with this process
        resume()
    assert started.is_beating(started.beats)


def test_each_node_is_asked_where_it_is(started: Started) -> None:
    host, node_ids = started.host, list(started.beats)
    here = {"multi_host": {"local0", "local1"}}.get(started.kind, {os.uname().nodename})
    assert {host.where(node_id) for node_id in node_ids} == here
    text = host.stacks()
    assert all(f"node {node_id}" in text for node_id in node_ids) and "in beat" in text
    for node_id, path in started.beats.items():
        if node_id in started.pids:
            until(lambda name=node_id, path=path: host.last_lines(name) == [f"{path.name} beats"])  # type: ignore[misc]
            log = host.log_path(node_id)
            assert log is not None and f"{path.name} beats" in log.read_text()
        else:
            assert (host.last_lines(node_id), host.log_path(node_id)) == ([], None)


def test_each_node_is_either_a_thread_here_or_a_process_that_is_looked_at(started: Started) -> None:
    processes = started.pids.keys()
    until(lambda: {view.node for view in started.host.look(1.0)} == processes)
    assert set(started.host.nodes_here().values()) == started.beats.keys() - processes
    assert started.host.dying() == {}


def test_one_node_is_killed_and_the_other_goes_on(started: Started) -> None:
    survivor, victim = started.beats
    started.host.kill([victim])  # a thread is only left behind
    until(lambda: started.coordinator.is_gone(victim))
    assert started.is_beating([survivor])
    assert started.coordinator.states()[survivor] == "running"


# A composite reaches every host that a call is about, whatever methods hosts have.

OF_ALL = {"start", "give_up", "suspend", "close", "stacks", "dying", "look", "nodes_here", "inject", "set_tracing"}
OF_SOME = {"stop_nodes", "terminate", "kill"}
OF_ONE = {"restart", "where", "last_lines", "log_path"}
RESULTS: dict[str, Any] = {"stacks": "text", "dying": {}, "look": [], "nodes_here": {}, "inject": {}}


def recorded(name: str, method: str, calls: list[tuple[Any, ...]]) -> Callable[..., Any]:
    def call(self: Host, *args: Any) -> Any:
        calls.append((name, method, *args))
        return (lambda: calls.append((name, "resume"))) if method == "suspend" else RESULTS.get(method)

    return call


def recording(name: str, calls: list[tuple[Any, ...]], **methods: Any) -> Host:
    """A host that notes each call; `methods` replace its own."""
    found = {method: recorded(name, method, calls) for method in Host.__abstractmethods__}
    return cast(Host, type("Recording", (Host,), {**found, **methods})())


@pytest.mark.parametrize("method", sorted(Host.__abstractmethods__ - {"clock_offset"}))  # it has one clock
def test_a_composite_passes_each_call_to_the_hosts_that_it_is_about(method: str) -> None:
    calls: list[tuple[Any, ...]] = []
    both = CompositeHost({recording("a", calls): ["a/0", "a/1"], recording("b", calls): ["b/0"]})
    if method in OF_ALL:
        getattr(both, method)(*[1.0] * (method in {"look", "inject", "set_tracing"}))
        assert [call[:2] for call in calls] == [("a", method), ("b", method)]
    elif method in OF_SOME:
        getattr(both, method)(iter(["a/1", "b/0", "a/0"]))
        assert calls == [("a", method, ["a/1", "a/0"]), ("b", method, ["b/0"])]
    else:
        assert method in OF_ONE
        getattr(both, method)("b/0")
        assert calls == [("b", method, "b/0")]


def test_a_composite_of_which_one_host_must_run_on_is_not_suspended() -> None:
    calls: list[tuple[Any, ...]] = []
    awake = recording("b", calls, suspend=lambda self: None)
    assert CompositeHost({recording("a", calls): ["a/0"], awake: ["b/0"]}).suspend() is None
    assert calls == [("a", "suspend"), ("a", "resume")]


def test_a_composite_resumes_what_it_has_suspended() -> None:
    calls: list[tuple[Any, ...]] = []
    resume = CompositeHost({recording("a", calls): ["a/0"], recording("b", calls): ["b/0"]}).suspend()
    assert resume is not None and ("a", "resume") not in calls
    resume()
    assert sorted(calls[2:]) == [("a", "resume"), ("b", "resume")]


def test_hosts_that_come_after_one_that_cannot_start_give_their_nodes_up() -> None:
    def fail(self: Host) -> None:
        raise OSError("no descriptors")

    calls: list[tuple[Any, ...]] = []
    hosts = recording("a", calls), recording("b", calls, start=fail), recording("c", calls)
    with pytest.raises(OSError, match="no descriptors"):
        CompositeHost({host: [str(index)] for index, host in enumerate(hosts)}).start()
    assert calls == [("a", "start"), ("c", "give_up")]


def test_all_hosts_are_closed_also_after_one_that_cannot_be() -> None:
    def fail(self: Host) -> None:
        raise OSError("disk full")

    calls: list[tuple[Any, ...]] = []
    with pytest.raises(OSError, match="disk full"):
        CompositeHost({recording("a", calls, close=fail): ["a/0"], recording("b", calls): ["b/0"]}).close()
    assert calls == [("b", "close")]
