"""The costs of an import: no engine, no torch, no gRPC, nothing that reads the network or starts threads."""

import subprocess
import sys

import pytest

import lp_pipe

CORE = [
    "lp_pipe",
    "lp_pipe.launch.launcher",
    "lp_pipe.launch.processes.template_process",
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


def test_what_is_for_several_hosts_is_imported_when_it_is_used() -> None:
    # A node's template imports lp_pipe anew for every launch: these modules were a fifth of it.
    loaded = {name for name in imported_by("lp_pipe") if name.startswith("lp_pipe.launch")}
    assert {name for name in loaded if ".engines." in name} == {"lp_pipe.launch.engines.base"}
    assert not loaded & {"lp_pipe.launch.elastic", "lp_pipe.launch.multi_host", "lp_pipe.launch.hosts.host_join"}


def test_elastic_names_are_there_before_their_module_is() -> None:
    code = (
        "import lp_pipe as lp; assert {'ElasticRun', 'launch_elastic', 'launch'} <= set(dir(lp)); "
        "assert 'import_module' not in dir(lp) and not hasattr(lp, 'lunch'); "
        "from lp_pipe import ElasticRun, launch_elastic; assert lp.ElasticRun is ElasticRun; "
        "import pickle; assert pickle.loads(pickle.dumps(launch_elastic)) is lp.launch_elastic; "
        "import lp_pipe.launch; assert lp.launch.__name__ == 'launch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def loaded_by_help(*command: str) -> set[str]:
    code = f"import sys; from lp_pipe.cli.main import main\ntry: main([*{command}, '--help'])\n"
    code += "except SystemExit: print('\\n', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("command", ["status", "agent"])
def test_a_command_imports_only_what_it_needs(command: str) -> None:
    assert not loaded_by_help(command) & {*HEAVY, "lp_pipe.pipeline", "lp_pipe.cli.schedule"}


def test_the_help_of_all_commands_does_not_wait_for_torch() -> None:
    # It took two and a half seconds: the checkpoint commands asked a module of torch's for a file's name.
    loaded = loaded_by_help()
    assert "lp_pipe.cli.checkpoint" in loaded and "torch" not in loaded


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
        *("launch", "Run", "launch_elastic", "ElasticRun", "CourierClient", "list_methods"),
        *("context", "NodeContext", "log_metrics", "stop", "stop_event", "wait_for_stop"),
        *("register_stop_handler", "unregister_stop_handler"),
        *("LpPipeError", "NodeError", "RemoteError", "DeadlineExceeded", "Unavailable", "MethodNotFound"),
        *("SerializationError", "LaunchError"),
    } <= set(dir(lp_pipe))


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
