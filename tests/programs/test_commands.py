"""The ready-made programs as users start them, and what is said when they cannot be."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lp_pipe.programs import evolution_strategies, parameter_server
from lp_pipe.programs.options import require

# A program, flags that make it small, and what it prints in the end.
PROGRAMS = {
    "producers_consumer": (["--files=10"], "sha256 of all files' digests"),
    "map_reduce": (["--job=inverted_index", "--files=30"], "words in 30 files"),
    "parameter_server": (["--mode=async", "--steps=300"], "test accuracy 9"),
    "evolution_strategies": (["--num_hidden=0"], "solved: mean return"),
}


def launch(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lp_pipe", "launch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_a_program_says_what_it_found(name: str, mode: str, tmp_path: Path) -> None:
    flags, found = PROGRAMS[name]
    done = launch(f"lp_pipe.programs.{name}", f"--mode={mode}", "--", *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert found in done.stdout
    assert "  step " in done.stdout  # progress


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_lists_the_flags_and_their_defaults(name: str, tmp_path: Path) -> None:
    done = launch(f"lp_pipe.programs.{name}", "--mode=process", "--", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: lp_pipe launch lp_pipe.programs.{name} --" in done.stdout
    assert "(default: 2)" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--num_mappers=0", "0 is below 1"),
        ("--num_mappers=x", "invalid int value: 'x'"),
        ("--mappers=2", "unrecognized"),
    ],
)
def test_a_wrong_flag_is_wrong_usage(flag: str, complaint: str, tmp_path: Path) -> None:
    done = launch("lp_pipe.programs.map_reduce", "--", flag, cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


class NotInstalled:
    """An import finder to which a package is not there."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("program", "module", "package"),
    [(parameter_server, "sklearn", "scikit-learn"), (evolution_strategies, "gymnasium", "gymnasium")],
)
def test_a_missing_package_is_named_with_what_to_install(
    program: ModuleType, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(module), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'lp_pipe\[examples\]', or pip install {package}"):
        program.make_program()


def test_what_a_package_misses_of_its_own_is_not_blamed_on_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught:
        require("half_installed", "half-installed")
    assert "pip install" not in str(caught.value)
