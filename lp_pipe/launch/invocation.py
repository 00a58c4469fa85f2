"""The command that launches a run, with its flags, and the sources and versions that the run has."""

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

    argv: the whole command. target, options: what `lp_pipe launch` was given; "" and nothing in a script.
    program_flags: what the program itself was given.
    """

    argv: tuple[str, ...]
    program_flags: tuple[str, ...] = ()
    target: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_command(self) -> bool:
        """Whether `lp_pipe launch` launches the run, and not a script."""
        return bool(self.target)

    @property
    def flags(self) -> dict[str, Any]:
        """What run.json says of it."""
        return {"target": self.target, "options": dict(self.options), "program": list(self.program_flags)}


def current_invocation() -> Invocation:
    """Return the command that `invoked_by` has set, or else this script's."""
    return _current or Invocation(script_arguments(), script_arguments()[1:])


@contextlib.contextmanager
def invoked_by(invocation: Invocation) -> Iterator[None]:
    """Let what is launched in the body be recorded as launched by this command."""
    global _current
    before, _current = _current, invocation
    try:
        yield
    finally:
        _current = before


_current: Invocation | None = None


def current_folder() -> str:
    """Return the current folder without links; "" where it was removed."""
    with contextlib.suppress(OSError):
        return os.path.realpath(os.getcwd())
    return ""


def versions() -> dict[str, str]:
    """Return the versions of what a run's results may depend on."""
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
    """Return {"commit", "dirty"} of the sources: where the script is, or the current folder.

    None outside of a git repository, and where git does not answer soon. Takes milliseconds: call it from a thread.
    Asked once in a process, whose modules are those of its start.
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
