"""The properties of nodes that are processes: their environment, their output, their isolation."""

import io
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.launch.plan.launch_plan import make_plan
from lp_pipe.launch.process import ProcessHost, make_host
from lp_pipe.launch.processes import template
from lp_pipe.launch.processes.node_link import NodeLink
from lp_pipe.launch.supervision import messages
from lp_pipe.process_tree import start_time
from lp_pipe.telemetry.metrics import MetricsLog

WITHIN_S = 20.0

pytestmark = pytest.mark.usefixtures("no_leaks")


class Probe:
    """Runs small functions inside its node."""

    def ask(self, function: Any, *args: Any) -> Any:
        return function(*args)


def probes(count: int = 1, **resources: Any) -> lp.Program:
    program = lp.Program("probes")
    with program.group("probe", resources=lp.Resources(**resources)):
        for _ in range(count):
            program.add_node(lp.CourierNode(Probe))
    return program


def test_every_node_is_a_process_of_its_own() -> None:
    with lp.launch(probes(3), "process") as run:
        pids = {run.client("probe", index).ask(os.getpid) for index in range(3)}
        assert pids == {row["pid"] for row in run.status()["probe"]}
        assert len(pids - {os.getpid()}) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_constructors_and_run_execute_in_the_main_thread() -> None:
    class Main:
        def __init__(self) -> None:
            self._seen = [threading.current_thread() is threading.main_thread()]

        def run(self) -> None:
            self._seen.append(threading.current_thread() is threading.main_thread())
            lp.wait_for_stop()

        def seen(self) -> list[bool]:
            return self._seen

    program = lp.Program("main thread")
    program.add_node(lp.CourierNode(Main), label="main")
    with lp.launch(program, "process") as run:
        while len(seen := run.client("main").seen()) < 2:
            pass
        assert seen == [True, True]


def test_nodes_get_environment_folder_and_path_as_they_are_at_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_module_of_the_user.py").write_text("value = 42\n")
    monkeypatch.setenv("MY_VARIABLE", "at launch")
    monkeypatch.setenv("MY_BYTES", "not utf-8: \udcff")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with lp.launch(probes(), "process") as run:
        monkeypatch.setenv("MY_VARIABLE", "changed later")
        monkeypatch.delenv("LP_PIPE_RUNS")
        probe = run.client("probe")
        assert probe.ask(os.getenv, "MY_VARIABLE") == "at launch"
        assert probe.ask(os.getenvb, b"MY_BYTES") == b"not utf-8: \xff"
        assert probe.ask(os.getcwd) == str(tmp_path)
        assert probe.ask(lambda: __import__("a_module_of_the_user").value) == 42
        assert probe.ask(lambda: sys.argv) == sys.argv


def test_nodes_start_whatever_a_script_has_put_into_its_path_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd_entries = [
        tmp_path,
        b"bytes",
        None,
        "lone \ud800 surrogate",
        "embedded \0 null",
        os.fsdecode(b"/not \xff utf-8"),
    ]
    monkeypatch.setattr(sys, "path", [*sys.path, *odd_entries])
    monkeypatch.setattr(sys, "argv", ["script", 5, tmp_path, b"bytes", "lone \ud800 surrogate"])
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with lp.launch(probes(), "process") as run:
        probe = run.client("probe")
        assert probe.ask(lambda: sys.path[-1]) == os.fsdecode(b"/not \xff utf-8")
        assert probe.ask(lambda: sys.argv) == ["script", "5", str(tmp_path), "bytes", "lone \ud800 surrogate"]
    monkeypatch.delattr(sys, "argv")
    with lp.launch(probes(), "process") as run:
        assert run.client("probe").ask(lambda: sys.argv) == [""]


def test_a_module_of_the_current_folder_does_not_stand_for_one_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with `python ../train.py` new interpreters imported a json.py there, and no node started."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not the json that was asked for')\n")
    monkeypatch.chdir(tmp_path)
    with lp.launch(probes(fresh_interpreter=True), "process") as run:
        assert run.client("probe").ask(lambda: __import__("json").loads("1")) == 1


def test_nodes_with_a_fresh_interpreter_have_the_launchers_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: -O, -W and -X dev did not reach them."""
    monkeypatch.setattr(sys, "warnoptions", ["default::FutureWarning"])
    with lp.launch(probes(fresh_interpreter=True), "process") as run:
        assert "default::FutureWarning" in run.client("probe").ask(lambda: sys.warnoptions)


@pytest.mark.parametrize("fresh", [False, True])
def test_resources_set_variables_and_compute_threads(fresh: bool) -> None:
    resources = {"threads": 2, "env": {"MY_VARIABLE": "mine"}, "fresh_interpreter": fresh}
    with lp.launch(probes(**resources), "process") as run:
        probe = run.client("probe")
        assert probe.ask(os.getenv, "MY_VARIABLE") == "mine"
        assert probe.ask(os.getenv, "OMP_NUM_THREADS") == "2"
        assert probe.ask(lambda: lp.context().resources.threads) == 2


def _pages_a_block() -> float:
    """Return the pages that the kernel must give for a block of 4 MiB, of which as much was freed before."""
    before = 0
    for count in range(60):
        if count == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytearray(4 << 20)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 50


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_nodes_keep_freed_memory_for_their_next_step_unless_the_user_has_said_how() -> None:
    with lp.launch(probes(), "process") as run:
        assert run.client("probe").ask(_pages_a_block) < 100
    with lp.launch(probes(env={"MALLOC_MMAP_THRESHOLD_": "65536"}), "process") as run:
        assert run.client("probe").ask(_pages_a_block) > 1000


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _asks_for_huge_pages() -> bool:
    """Return whether there is memory that would be given in pages of 2 MiB."""
    kept = bytearray(16 << 20)
    flags = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("VmFlags:")]
    return len(kept) > 0 and any("hg" in of_region for of_region in flags)


def _are_for_who_asks() -> bool:
    library, version = platform.libc_ver()
    knows_how = library == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return knows_how and _HUGE_PAGES.exists() and "[madvise]" in _HUGE_PAGES.read_text()


@pytest.mark.skipif(not _are_for_who_asks(), reason="glibc or the kernel gives them to nobody, or to all")
@pytest.mark.parametrize("fresh", [False, True])
def test_the_memory_of_nodes_is_in_huge_pages_and_their_environment_does_not_show_it(fresh: bool) -> None:
    with lp.launch(probes(fresh_interpreter=fresh), "process") as run:
        assert run.client("probe").ask(_asks_for_huge_pages)
        assert run.client("probe").ask(os.getenv, "GLIBC_TUNABLES") is None


def test_variables_that_are_read_at_process_start_imply_a_fresh_interpreter() -> None:
    assert lp.Resources(env={"PYTHONHASHSEED": "7"}).needs_fresh_interpreter
    assert not lp.Resources(env={"MY_VARIABLE": "7"}).needs_fresh_interpreter
    with lp.launch(probes(count=2, env={"PYTHONHASHSEED": "7"}), "process") as run:
        assert run.client("probe", 0).ask(lambda: hash("x")) == run.client("probe", 1).ask(lambda: hash("x"))
        assert run.client("probe").ask(lambda: sys.flags.hash_randomization) == 1


def test_a_group_may_have_modules_of_its_own(tmp_path: Path) -> None:
    """Regression: the group's PYTHONPATH had no effect, as nodes import along the launcher's path."""
    for version in ("old", "new"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "library_of_a_group.py").write_text(f"VERSION = {version!r}\n")
    program = lp.Program("probes")
    for version in ("old", "new"):
        with program.group(version, resources=lp.Resources(env={"PYTHONPATH": str(tmp_path / version)})):
            program.add_node(lp.CourierNode(Probe))
    with lp.launch(program, "process") as run:
        for version in ("old", "new"):
            assert run.client(version).ask(lambda: __import__("library_of_a_group").VERSION) == version


def test_forked_nodes_draw_different_random_numbers() -> None:
    def draw() -> tuple[float, float]:
        import random

        import numpy

        return random.random(), float(numpy.random.rand())

    with lp.launch(probes(count=2), "process") as run:
        (one, two), (three, four) = run.client("probe", 0).ask(draw), run.client("probe", 1).ask(draw)
    assert len({one, two, three, four}) == 4


def test_output_reaches_the_launcher_in_whole_lines_with_the_nodes_name(script: Any) -> None:
    launcher = script("""
        import subprocess, sys
        import lp_pipe as lp

        def speak():
            print("to stdout")
            print("to stderr", file=sys.stderr)
            subprocess.run(["echo", "from a child"])
            sys.stdout.write("without an end")

        program = lp.Program("speaking")
        for _ in range(2):
            with program.group("speaker"):
                program.add_node(lp.PyNode(speak))
        run = lp.launch(program, "process")
        run.wait()
        assert run.log_path("speaker", 1).read_text().splitlines().count("to stdout") == 1
    """)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode == 0, err
    expected = [f"[speaker/{i}] {text}" for i in (0, 1) for text in ("to stdout", "from a child", "without an end")]
    assert sorted(out.splitlines()) == sorted(expected)
    assert sorted(err.splitlines()) == ["[speaker/0] to stderr", "[speaker/1] to stderr"]


def test_a_lost_log_folder_does_not_block_the_nodes(tmp_path: Path) -> None:
    # The thread that reads the nodes' output died of the first error, and the nodes waited at a full pipe.
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "noisy-0.log").mkdir()
    program = lp.Program("noisy")
    program.add_node(lp.PyNode(lambda: print("x" * 200_000)), label="noisy")
    lp.launch(program, "process", run_dir=tmp_path).wait(WITHIN_S)


def test_everything_of_a_script_may_be_a_node_without_a_main_guard(script: Any) -> None:
    launcher = script("""
        import dataclasses, enum, os
        import lp_pipe as lp

        factor = 3

        class Colour(enum.Enum):
            RED = 1

        @dataclasses.dataclass
        class Point:
            x: int

        class MineError(ValueError):
            pass

        class Base:
            def scale(self, point):
                assert isinstance(point, Point), type(point)
                return Point(point.x * factor)

        class Server(Base):
            def colour(self, colour):
                assert colour is Colour.RED
                return colour

            def fail(self):
                raise MineError("mine")

            def call(self, function):
                return function(2)

            def itself(self):
                return Point

        def use(server, path):
            assert server.scale(Point(2)) == Point(6)
            assert server.colour(Colour.RED) is Colour.RED
            assert server.call(lambda x: x + factor) == 5
            assert server.itself() is Point
            try:
                server.fail()
            except MineError as error:
                assert error.args == ("mine",)
            print("all well in", os.getpid() != launcher)
            lp.stop()

        launcher = os.getpid()
        program = lp.Program("main")
        server = program.add_node(lp.CourierNode(Server), label="server")
        program.add_node(lp.PyNode(use, server, path="x"), label="user")
        run = lp.launch(program, "process")
        client = run.client(server)
        try:
            assert client.scale(Point(1)) == Point(3)
            assert client.colour(Colour.RED) is Colour.RED
        except lp.Unavailable:
            pass  # the user was faster
        run.wait()
    """)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "[user/0] all well in True" in out, err
    assert launcher.returncode == 0


def test_a_module_that_lies_beside_the_script_is_found_by_the_nodes(script: Any, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("class Server:\n    def answer(self):\n        return 42\n")
    launcher = script("""
        import lp_pipe as lp
        from beside import Server

        program = lp.Program("beside")
        program.add_node(lp.CourierNode(Server), label="server")
        with lp.launch(program, "process") as run:
            print(run.client("server").answer())
    """)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert out.strip() == "42", err


def test_a_launch_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python here"))
    with pytest.raises(lp.LaunchError, match="no python here"):
        lp.launch(probes(), "process")


def test_an_interpreter_that_cannot_run_nodes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises((lp.NodeError, lp.LaunchError), match="template"):
        lp.launch(probes(), "process").wait(WITHIN_S)


def test_long_names_of_the_temporary_folder_are_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A unix socket's path has 107 bytes at most; the folder that a batch system makes may be longer.
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with lp.launch(probes(), "process") as run:
        assert run.client("probe").ask(os.getppid)


def test_signals_are_as_in_a_fresh_interpreter_in_a_node_and_in_what_it_starts() -> None:
    # SIGINT was ignored there, and so in every program that a node starts: none could be ended by it.
    with lp.launch(probes(), "process") as run:
        probe = run.client("probe")
        assert probe.ask(signal.getsignal, signal.SIGINT) is signal.default_int_handler
        assert probe.ask(signal.getsignal, signal.SIGTERM) == signal.SIG_DFL
        assert probe.ask(end_by_sigint) == -signal.SIGINT
        assert probe.ask(os.getpid) == probe.ask(os.getsid, 0)  # Ctrl+C at a terminal does not reach it


def end_by_sigint() -> int:
    with subprocess.Popen(["sleep", "60"]) as child:
        child.send_signal(signal.SIGINT)
        return child.wait(WITHIN_S)


def test_a_node_may_launch_a_program_of_its_own() -> None:
    def outer() -> None:
        inner = lp.Program("inner")
        inner.add_node(lp.CourierNode(Probe), label="probe")
        for mode in ("thread", "process"):
            with lp.launch(inner, mode) as run:
                assert run.client("probe").ask(abs, -3) == 3

    program = lp.Program("outer")
    program.add_node(lp.PyNode(outer), label="outer")
    lp.launch(program, "process").wait(WITHIN_S)


def test_nodes_of_many_processes_start_within_seconds() -> None:
    with lp.launch(probes(count=12), "process") as run:
        assert len({run.client("probe", index).ask(os.getpid) for index in range(12)}) == 12


def test_stopping_at_once_after_the_launch_is_clean() -> None:
    for _ in range(5):
        run = lp.launch(probes(count=3), "process")
        run.stop()
        run.wait()


def test_torch_nodes_are_forked_with_torch_loaded_and_compute_with_their_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "_WORTH_PRELOADING", ("numpy", "torch"))
    import torch

    def compute() -> tuple[int, float]:
        return torch.get_num_threads(), float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())

    with lp.launch(probes(count=2, threads=2), "process") as run:
        results = [run.client("probe", index).ask(compute) for index in range(2)]
        draws = {run.client("probe", index).ask(lambda: float(torch.rand(()))) for index in range(2)}
    assert results == [(2, 300.0**3)] * 2
    assert len(draws) == 2


def test_stages_are_forked_with_what_optimizers_load(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each stage took two seconds and 70 MB for itself.
    import lp_pipe.pipeline.worker.worker as stages

    monkeypatch.setattr(template, "_WORTH_PRELOADING", (stages.__name__,))
    with lp.launch(probes(count=1), "process") as run:
        assert run.client("probe", 0).ask(lambda: "torch._dynamo" in sys.modules)


def test_a_host_that_does_not_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal between the two used to."""
    temporary, run_dir = tmp_path / "temporary", tmp_path / "run"
    for folder in (temporary, run_dir):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    make_host(make_plan(probes(), run_dir, 5.0), MetricsLog(run_dir / "metrics.jsonl"))
    assert list(temporary.iterdir()) == []


def test_a_process_that_reports_in_after_the_stop_is_told_so_before_what_it_is_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: a node that was just started again ran some of its code before it was told."""

    def stopped(host: ProcessHost, stream: NodeLink, hello: messages.Hello) -> None:
        host._coordinator.tell("node/0", messages.RequestStop())
        on_hello(host, stream, hello)

    def noted(stream: NodeLink, notice: messages.Notice, payload: bytes | None = None) -> None:
        said.append(type(notice).__name__)
        send(stream, notice, payload)

    said: list[str] = []
    on_hello, send = ProcessHost._on_hello, NodeLink.tell_if_open
    monkeypatch.setattr(ProcessHost, "_on_hello", stopped)
    monkeypatch.setattr(NodeLink, "tell_if_open", noted)
    program = lp.Program("late")
    program.add_node(lp.PyNode((tmp_path / "has run").touch), label="node")
    lp.launch(program, "process").wait(WITHIN_S)
    assert said[:2] == ["Stop", "StartNode"]
    assert not list(tmp_path.iterdir())


def parent_to(path: Path) -> None:
    path.write_text(str(os.getppid()))


def test_a_template_that_is_kept_warm_serves_later_launches_until_it_dies(tmp_path: Path, no_leaks: None) -> None:
    def parent() -> int:
        program = lp.Program("warm")
        program.add_node(lp.PyNode(parent_to, tmp_path / "parent"), label="child")
        lp.launch(program, "process").wait(WITHIN_S)
        return int((tmp_path / "parent").read_text())

    with template.kept_warm():
        first = parent()
        assert parent() == first
        os.kill(first, signal.SIGKILL)
        second = parent()
        assert second != first and parent() == second
    assert parent() != second and not start_time(second)
