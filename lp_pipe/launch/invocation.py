"""Facts for a run's record: the command that launched it, its flags, the versions and the state of the sources."""

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lp_pipe.launch.plan.surroundings import script_arguments

_GIT_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Invocation:
    """A command that launches a run.

    argv: the whole command. target, options: the arguments of `lp_pipe launch`; empty in a script.
    program_flags: the arguments of the program itself.
    """

    argv: tuple[str, ...]
    program_flags: tuple[str, ...] = ()
    target: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_command(self) -> bool:
        """Whether `lp_pipe launch` launches the run. Otherwise a script does."""
        return bool(self.target)

    @property
    def flags(self) -> dict[str, Any]:
        """The value of "flags" in run.json."""
        return {"target": self.target, "options": dict(self.options), "program": list(self.program_flags)}


def current_invocation() -> Invocation:
    """Return the command that `invoked_by` has set, by default this script's."""
    return _current or Invocation(script_arguments(), script_arguments()[1:])


@contextlib.contextmanager
def invoked_by(invocation: Invocation) -> Iterator[None]:
    """Record runs that are launched in the body as launched by this command."""
    global _current
    before, _current = _current, invocation
    try:
        yield
    finally:
        _current = before


_current: Invocation | None = None


def current_folder() -> str:
    """Return the current folder without links; "" if it was removed."""
    with contextlib.suppress(OSError):
        return os.path.realpath(os.getcwd())
    return ""


def versions() -> dict[str, str]:
    """Return the versions of Python, lp_pipe and a loaded torch, on which a run's results may depend."""
    found = {"python": platform.python_version(), "lp_pipe": _own_version()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


@functools.cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("lp_pipe")
    except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return "not installed"


def git_state() -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of the sources in the script's folder or the current one.

    None outside of a git repository, or if git does not answer soon. Takes milliseconds: call it from a thread. git is
    asked only once per process, since a process keeps the modules that it has imported.
    """
    script = Path(script_arguments()[0] or ".")
    with contextlib.suppress(OSError):
        folder = (script.parent if script.is_file() else Path.cwd()).resolve()
        if any((parent / ".git").exists() for parent in (folder, *folder.parents)):
            return _asked_of_git(folder)
    return None


@functools.cache
def _asked_of_git(folder: Path) -> dict[str, Any] | None:
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_GIT_PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, another user's repository, a slow disk
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    commits = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits == ["(initial)"]:
        return None
    return {"commit": commits[0], "dirty": any(not line.startswith("#") for line in lines)}
