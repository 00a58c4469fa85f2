"""`lp_pipe doctor` on this machine, and on a worse one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lp_pipe.cli import doctor
from lp_pipe.torch_version import NEWEST, WANTED
from tests.cli.commands import COMMAND, PATIENCE_S, Command

NAMES = ["python", "lp_pipe", "numpy", "protobuf", "torch", "open files", "processes", "/dev/shm", "hostname"]
NAMES += ["loopback", "unix socket", "run folder", "death signals", "fork", "gpu", "pipeline"]


def by_name(output: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in map(json.loads, output.splitlines())}


def test_a_machine_that_runs_these_tests_is_healthy(command: Command) -> None:
    done = command("doctor", "--json")
    checks = by_name(done.stdout)
    assert (done.returncode, done.stderr, list(checks)) == (0, "", NAMES)
    assert {check["level"] for check in checks.values()} <= {"ok", "warn"}
    assert all(check["fix"] for check in checks.values() if check["level"] == "warn")
    assert {checks[name]["level"] for name in ("fork", "unix socket", "torch", "pipeline")} == {"ok"}


def test_what_fails_has_a_line_with_the_command_that_fixes_it(folder: Path) -> None:
    limited = ["bash", "-c", 'ulimit -Sn 200; exec "$@"', "bash", *COMMAND, "doctor"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder, check=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    place = lines.index("fail  open files     200: room for about 50 node processes")
    assert lines[place + 1].startswith("                     fix: ulimit -n ")


def run_doctor(prelude: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run `lp_pipe doctor` in an interpreter that has first run the prelude."""
    code = f"{prelude}\nfrom lp_pipe.cli.main import main; raise SystemExit(main(['doctor', '--json']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.returncode, by_name(done.stdout)


def test_what_is_worse_than_usual_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give one run an unwritable state folder, a temporary folder with a long path, and a torch newer than tested."""
    (folder / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "file"))
    monkeypatch.delenv("LP_PIPE_RUNS", raising=False)
    long = folder / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    newer = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"
    status, checks = run_doctor(
        "import importlib.metadata as m; version = m.version; "
        f"m.version = lambda name: '{newer}' if name == 'torch' else version(name)"
    )
    assert status == 0
    assert checks["run folder"]["level"] == "warn"
    assert checks["run folder"]["text"].startswith(f"{folder}/file/lp_pipe/runs cannot be written (Not a directory): ")
    assert checks["unix socket"]["level"] == "warn"
    assert checks["unix socket"]["text"] == f"the path of {long} is too long for sockets; /tmp is used instead"
    assert [path for path in long.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch leaves that
    assert (checks["torch"]["level"], checks["pipeline"]["level"]) == ("warn", "ok")
    assert newer in checks["torch"]["text"] and WANTED in checks["torch"]["fix"]


def test_a_torch_with_which_no_pipeline_trains_is_a_failure() -> None:
    status, checks = run_doctor("import torch; del torch.optim.SGD")
    assert (status, checks["pipeline"]["level"]) == (1, "fail")
    assert "AttributeError" in checks["pipeline"]["text"] and WANTED in checks["pipeline"]["fix"]


def test_without_torch_pipelines_are_not_tried() -> None:
    status, checks = run_doctor(
        "import importlib.metadata as m, sys; sys.modules['torch'] = None; version = m.version\n"
        "def look(name):\n"
        "    if name == 'torch': raise m.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "m.version = look"
    )
    assert (status, checks["torch"]["level"], checks["pipeline"]["level"]) == (0, "warn", "warn")
    assert "not installed" in checks["torch"]["text"] and WANTED in checks["pipeline"]["fix"]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_a_machine_that_is_asked_for_its_gpus_and_has_none_fails() -> None:
    (check,) = doctor.run_checks(doctor.gpu_checks())
    assert (check.name, check.level) == ("gpus", "fail") and check.fix
