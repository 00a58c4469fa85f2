"""What importing costs: no engine, no torch, no gRPC, nothing that reads the network or starts threads."""

import subprocess
import sys

import pytest

import lp_pipe

CORE = [
    "lp_pipe",
    "lp_pipe.launch.launcher",
    "lp_pipe.launch.processes.zygote",
    "lp_pipe.launch.processes.template",
    "lp_pipe.launch.processes.node_main",
    "lp_pipe.launch.process",
    "lp_pipe.launch.thread",
    "lp_pipe.rpc.codec",
    "lp_pipe.connections",
    "lp_pipe.testing",
    "lp_pipe.testing.plugin",
]
HEAVY = ["torch", "grpc", "numpy", "ray", "kubernetes", "pandas", "absl", "rich", "asyncio", "multiprocessing"]
HEAVY += ["sklearn", "scipy", "gymnasium"]


def imported_by(module: str) -> set[str]:
    code = f"import sys, threading, {module}; assert threading.active_count() == 1; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_nothing_heavy(module: str) -> None:
    assert not imported_by(module) & set(HEAVY)


def test_pipelines_list_all_their_names_and_load_torch_for_none_of_them() -> None:
    code = "import sys, lp_pipe.pipeline as pp; print(*dir(pp)); assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"add_pipeline", "split", "PipelineClient", "make_schedule", "Model"} <= set(listed)
    assert "import_module" not in listed


def test_programs_do_not_import_what_tests_need() -> None:
    assert not imported_by("lp_pipe") & {"pytest", "lp_pipe.testing"}


@pytest.mark.parametrize("name", ["producers_consumer", "map_reduce", "parameter_server", "evolution_strategies"])
def test_a_ready_made_program_imports_no_data_set_and_no_environment(name: str) -> None:
    assert not imported_by(f"lp_pipe.programs.{name}") & {"torch", "sklearn", "scipy", "gymnasium"}


def test_processes_of_one_host_never_load_grpc(no_leaks: None) -> None:
    # The template must not have it: its threads do not survive a fork.
    program = lp_pipe.Program("imports")
    with program.group("server"):
        server = program.add_node(lp_pipe.CourierNode(Modules))
    with lp_pipe.launch(program, "process") as run:
        loaded = run.client(server).loaded()
    assert "lp_pipe.connections.unix" in loaded
    assert not {"grpc", "cryptography"} & set(loaded)


class Modules:
    def loaded(self) -> list[str]:
        return sorted(sys.modules)


def test_the_public_names() -> None:
    assert {
        *("Address", "get_port_from_address", "Program", "Resources"),
        *("Node", "PyNode", "PyClassNode", "CourierNode", "Handle", "CourierHandle", "Deferred"),
        *("launch", "Run", "CourierClient", "list_methods"),
        *("context", "NodeContext", "log_metrics", "stop", "stop_event", "wait_for_stop"),
        *("register_stop_handler", "unregister_stop_handler"),
        *("LpPipeError", "NodeError", "RemoteError", "DeadlineExceeded", "Unavailable", "MethodNotFound"),
        *("SerializationError", "LaunchError"),
    } <= set(vars(lp_pipe))


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (lp_pipe.NodeError, RuntimeError),
        (lp_pipe.RemoteError, RuntimeError),
        (lp_pipe.DeadlineExceeded, TimeoutError),
        (lp_pipe.Unavailable, ConnectionError),
        (lp_pipe.MethodNotFound, AttributeError),
        (lp_pipe.SerializationError, RuntimeError),
    ],
)
def test_errors_can_be_caught_by_their_builtin_class(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, lp_pipe.LpPipeError)
    assert issubclass(error, builtin)
