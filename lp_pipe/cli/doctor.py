"""`lp_pipe doctor`: check whether programs can run on this machine. Each check is one function."""

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import lp_pipe as lp
from lp_pipe import connections
from lp_pipe.cli.errors import DONE, UNHEALTHY
from lp_pipe.connections.kernel_calls import has_pidfd
from lp_pipe.connections.socket_dir import fits, make_socket_dir
from lp_pipe.launch.run_dir import usual_runs
from lp_pipe.launch.run_records import live_folder
from lp_pipe.torch_version import WANTED, is_tested, is_too_old
from lp_pipe.user_folders import is_temporary

_MIB = 1 << 20
_PATIENCE_S = 30.0
_PR_GET_PDEATHSIG = 2
_FDS_PER_NODE = 3  # two pipes and a stream, in the launcher
_OWN_FDS = 50  # of the launcher itself
_FEW_FDS, _VERY_FEW_FDS = 1024, 256
_FEW_PROCESSES = 512  # threads count as well
_INSTALL_TORCH = f"pip install '{WANTED}'    (only pipelines need it)"


@dataclass(frozen=True)
class Check:
    """The result of a check.

    level: "ok", "warn" (something does not work, or is slower) or "fail" (programs do not run). fix: a command.
    """

    name: str
    level: str
    text: str
    fix: str = ""


def run_checks(checks: Mapping[str, Callable[[], Sequence[str]]]) -> list[Check]:
    """Run all checks; a check that raises counts as failed."""
    results = []
    for name, check in checks.items():
        try:
            level, text, *fix = check()
        except Exception as error:  # any error shows a fault of this machine
            level, text, fix = "fail", f"{type(error).__name__}: {error}", []
        results.append(Check(name, level, text, *fix))
    return results


def check_python() -> Sequence[str]:
    return "ok", f"{platform.python_version()} ({sys.executable}), {platform.platform()}"


def check_package(name: str, fix: str, level: str = "fail") -> Sequence[str]:
    try:
        return "ok", importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return level, "not installed", fix


def check_torch() -> Sequence[str]:
    level, version, *fix = check_package("torch", _INSTALL_TORCH, level="warn")
    if level == "warn":
        return level, "not installed: pipelines cannot run, everything else can", *fix
    if is_too_old(version):
        return "warn", f"{version} is too old for pipelines", f"pip install --upgrade '{WANTED}'"
    if not is_tested(version):
        return "warn", f"{version}: lp_pipe was not tested with this version", f"pip install '{WANTED}'"
    return level, version


def check_shm() -> Sequence[str]:
    """Check the size of /dev/shm, which torch's DataLoader workers use. lp_pipe's own tensors travel in memfds."""
    if not Path("/dev/shm").is_dir():
        return "ok", "not on this system; lp_pipe itself does not need it"
    total, _, free = shutil.disk_usage("/dev/shm")
    text = f"{free // _MIB} of {total // _MIB} MiB free"
    if free < 512 * _MIB:
        fix = "sudo mount -o remount,size=8G /dev/shm    (docker: --shm-size=8g)"
        return "warn", f"{text}: too little for a torch DataLoader with workers (lp_pipe does not use it)", fix
    return "ok", text


def check_open_files() -> Sequence[str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "ok", "unlimited"
    level = "fail" if soft < _VERY_FEW_FDS else "warn" if soft < _FEW_FDS else "ok"
    text = f"{soft}: room for about {max(0, (soft - _OWN_FDS) // _FDS_PER_NODE)} node processes"
    return (level, text) if level == "ok" else (level, text, f"ulimit -n {65536 if hard < 0 else min(65536, hard)}")


def check_processes() -> Sequence[str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY:
        return "ok", "unlimited"
    if soft < _FEW_PROCESSES:
        return "warn", f"{soft}, threads included", f"ulimit -u {8192 if hard < 0 else min(8192, hard)}"
    return "ok", f"{soft}, threads included"


def check_hostname() -> Sequence[str]:
    name = socket.gethostname()
    fix = f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts"
    began = time.monotonic()
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError as error:
        return "warn", f"{name} does not resolve ({error.strerror}): libraries may need it to reach this host", fix
    seconds = time.monotonic() - began
    text = f"{name} is {', '.join(sorted(found))}"
    return ("warn", f"{text}, after {seconds:.1f} s", fix) if seconds > 1 else ("ok", text)


def check_loopback() -> Sequence[str]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S):
                return "ok", f"port {port} of 127.0.0.1 was bound and reached"
    except OSError as error:
        return "fail", f"cannot bind and reach a port of 127.0.0.1: {error}", "sudo ip link set lo up"


def check_unix_socket() -> Sequence[str]:
    folder = make_socket_dir()
    try:
        listener = connections.listen(f"unix:{folder}/coordinator", lambda connection: connection.close())
        connections.connect(listener.endpoint).close()
        listener.close()
    except (OSError, lp.Unavailable) as error:
        return (
            "fail",
            f"cannot use a unix socket in {folder}: {error}",
            "export TMPDIR=/tmp    (or any folder on a local disk)",
        )
    finally:
        shutil.rmtree(folder)
    usual = tempfile.gettempdir()
    if not fits(usual):
        return "warn", f"the path of {usual} is too long for sockets; /tmp is used instead", "export TMPDIR=/tmp"
    return "ok", f"in {usual}"


def check_run_folder() -> Sequence[str]:
    fix = "export XDG_STATE_HOME=/folder/that/can/be/written"
    try:
        folder, live = usual_runs(), live_folder()
    except lp.LaunchError as error:
        return "warn", str(error), fix
    try:
        for wanted in (folder, live):
            there = next(path for path in (wanted, *wanted.parents) if path.exists())
            with tempfile.TemporaryDirectory(dir=there):
                pass
    except OSError as error:
        return (
            "warn",
            f"{wanted} cannot be written ({error.strerror}): scripts cannot launch, and ps and status do not see runs",
            fix,
        )
    if is_temporary(folder):
        return "warn", f"the home folder cannot be written: logs of scripts' runs are in {folder}", fix
    return "ok", f"{folder}, for logs of scripts' runs, can be written"


def check_fork() -> Sequence[str]:
    """Run a program of one node from launch to end: template process, fork, stream, exit."""
    program = lp.Program("doctor")
    program.add_node(lp.PyNode(os.getpid), label="node")
    began = time.monotonic()
    fix = "lp_pipe launch TARGET --mode=thread    (meanwhile, all nodes in one process)"
    with tempfile.TemporaryDirectory() as run_dir:
        try:
            with lp.launch(program, "process", run_dir=run_dir, listed=False) as run:
                run.wait(_PATIENCE_S)
        except (lp.LpPipeError, TimeoutError) as error:
            return "fail", f"cannot run a node process: {str(error).splitlines()[0]}", fix
    return "ok", f"a node process started, ran and ended within {time.monotonic() - began:.2f} s"


def check_pipeline() -> Sequence[str]:
    """Train a pipeline of two stages for one step, in threads: torch's private parts differ between its versions."""
    try:
        import torch
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        why = "torch is not installed" if is_missing else f"torch cannot be imported: {error}"
        return "warn", f"not tried: {why}", _INSTALL_TORCH
    began = time.monotonic()
    try:
        _train_one_step()
    except Exception as error:  # depends on what this torch lacks
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return "fail", f"a pipeline cannot train with torch {torch.__version__}: {why}", f"pip install '{WANTED}'"
    return "ok", f"two stages trained for one step within {time.monotonic() - began:.2f} s"


def _train_one_step() -> None:
    import torch
    from torch import nn

    import lp_pipe.pipeline as pp

    layers = [nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)]
    model = pp.Model(layers, nn.functional.mse_loss, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    program = lp.Program("doctor")
    handle = pp.add_pipeline(program, model, stages=2, microbatches=2, device="cpu")
    with tempfile.TemporaryDirectory() as run_dir, lp.launch(program, "thread", run_dir=run_dir, listed=False) as run:
        run.client(handle).step((torch.ones(4, 2), torch.ones(4, 1)))


def check_death_signals() -> Sequence[str]:
    """Check the system calls that end nodes at once when their launcher is killed. Without, its silence ends them."""
    missing = [] if has_pidfd() else ["pidfd"]
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(ctypes.c_int()), 0, 0, 0):
        missing.append("prctl")
    if missing:
        fix = "uname -r    (Linux 5.3 or newer; in a container: a seccomp profile that allows pidfd_open and prctl)"
        return "warn", f"no {' and no '.join(missing)}: nodes of a killed launcher end within 15 s, not at once", fix
    return "ok", "pidfd and prctl work: nodes end with their launcher"


def check_gpu() -> Sequence[str]:
    if not Path("/dev/nvidiactl").exists():
        return "ok", "no GPU: pipelines run on the CPU"
    try:
        import torch
    except ImportError:
        return "warn", "there is a GPU, but no torch", "pip install torch"
    if not torch.cuda.is_available():
        fix = "nvidia-smi && pip install --force-reinstall torch    (a build for this driver's CUDA)"
        return "warn", f"there is a GPU, but torch {torch.__version__} cannot use it", fix
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    return "ok", ", ".join(names)


def gpu_checks() -> dict[str, Callable[[], Sequence[str]]]:
    """Return the checks that need a GPU, and torch."""
    try:
        from lp_pipe.cli import gpu_checks
    except ImportError:
        return {"gpus": lambda: ("fail", "torch is not installed", _INSTALL_TORCH)}
    return gpu_checks.checks()


CHECKS: dict[str, Callable[[], Sequence[str]]] = {
    "python": check_python,
    "lp_pipe": lambda: check_package("lp_pipe", "pip install .    (in a clone of lp_pipe)", level="warn"),
    "numpy": lambda: check_package("numpy", "pip install numpy"),
    "protobuf": lambda: check_package("protobuf", "pip install protobuf"),
    "torch": check_torch,
    "open files": check_open_files,
    "processes": check_processes,
    "/dev/shm": check_shm,
    "hostname": check_hostname,
    "loopback": check_loopback,
    "unix socket": check_unix_socket,
    "run folder": check_run_folder,
    "death signals": check_death_signals,
    "fork": check_fork,
    "gpu": check_gpu,  # imports torch, after which a fork takes longer
    "pipeline": check_pipeline,
}


HELP = "check whether programs can run on this machine"
DESCRIPTION = "Check what programs need of this machine, and print a fix for each fault. Nothing is changed."
USAGE = "lp_pipe doctor [--gpu] [--json]"
EPILOG = "Exit status: 0 programs can run, 1 something fails."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--gpu", action="store_true", help="also send tensors between processes: CUDA IPC, NCCL, and which is taken"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print a line for each check, and the command that fixes a fault below it."""
    checks = run_checks(CHECKS | gpu_checks() if arguments.gpu else CHECKS)
    for check in checks:
        print(json.dumps(asdict(check)) if arguments.json else _described(check))
    return UNHEALTHY if any(check.level == "fail" for check in checks) else DONE


def _described(check: Check) -> str:
    line = f"{check.level:<4}  {check.name:<13}  {check.text}"
    return f"{line}\n{'':21}fix: {check.fix}" if check.fix else line
