"""The state that nodes inherit from the launching process: environment, folder, import path, arguments, settings."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from lp_pipe.errors import LaunchError
from lp_pipe.launch.plan import interpreter_state
from lp_pipe.rpc import main_module

# Variables that describe a host, or a login there, and not the program.
_OF_A_HOST = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "HOST", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "TERM"),
        *("MAIL", "DISPLAY", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH"),
        "CUDA_VISIBLE_DEVICES",
    ]
)
_PREFIXES_OF_A_HOST = ("SSH_", "XDG_", "DBUS_", "SLURM", "KUBERNETES_", "RAY_", "LP_PIPE_TEMPLATE", "LP_PIPE_HOST_")


@dataclass(frozen=True)
class Surroundings:
    """The state of the launching process at `launch()` that nodes inherit. Is pickled and sent to agents.

    state: the settings of the script's process, see interpreter_state.py.
    synced: the launcher's folder (an absolute path without links) of which each host has its own copy; "" for none.
    main: attributes of the launcher's `__main__` that describe its script.
    """

    environment: Mapping[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    state: bytes
    synced: str = ""
    main: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def capture(cls, synced: str = "") -> Self:
        """Return what nodes inherit from this process as it is now."""
        # A variable without a name may be inherited by exec, but cannot be set in any other way.
        environment = {name: value for name, value in os.environ.items() if name}
        state = interpreter_state.capture()
        paths = import_path(), script_arguments()
        return cls(environment, _current_folder(), *paths, state, synced, main_module.facts())

    def on_this_host(self, tree: str = "") -> "Surroundings":
        """Adapt what a launcher on another host has sent. What describes a host is taken from this process.

        The import path has the synced folders first, then this interpreter's own, then those of the launcher's folders
        that exist here, too (on a shared file system).

        tree: the folder with this host's copy of the synced one.
        """
        theirs = {name: value for name, value in self.environment.items() if not _is_of_a_host(name)}
        ours = {name: value for name, value in os.environ.items() if _is_of_a_host(name)}
        cwd = self._synced(self.cwd, tree)
        if cwd is None:
            cwd = next(filter(_may_be_entered, [self.cwd, os.getcwd(), os.path.expanduser("~")]), "/")
        synced = {path: found for path in self.sys_path if (found := self._synced(path, tree)) is not None}
        shared = (path for path in self.sys_path if path not in synced and os.path.isdir(path))
        paths = dict.fromkeys([*synced.values(), *import_path(), *shared])
        surroundings = {**theirs, **ours}, cwd, tuple(paths), self.argv, self.state
        return Surroundings(*surroundings, main=self._main_here(tree))

    def _main_here(self, tree: str) -> dict[str, str]:
        """Return `main` with the script's file replaced by its copy, if its folder was synced."""
        folder, name = os.path.split(self.main.get("__file__", ""))
        copy = self._synced(folder, tree)
        return {**self.main} if copy is None else {**self.main, "__file__": os.path.join(copy, name)}

    def _synced(self, folder: str, tree: str) -> str | None:
        """Return this host's copy of one of the launcher's folders; None if it was not synced."""
        if not tree or not os.path.isabs(folder):
            return None
        below = os.path.relpath(os.path.realpath(folder), self.synced)
        found = os.path.normpath(os.path.join(tree, below))
        return None if below.startswith("..") or not os.path.isdir(found) else found


def import_path() -> tuple[str, ...]:
    """Return this process's import path, without entries that Python ignores (a Path, bytes) or fails on."""
    return tuple(entry for entry in sys.path if isinstance(entry, str) and _can_be_path(entry))


def _can_be_path(entry: str) -> bool:
    try:
        return b"\0" not in os.fsencode(entry)
    except UnicodeEncodeError:
        return False


def script_arguments() -> tuple[str, ...]:
    """Return the arguments of this process as text. A script may have stored anything there, or deleted them."""
    arguments = getattr(sys, "argv", None) or [""]
    return tuple(os.fsdecode(one) if isinstance(one, bytes | os.PathLike) else str(one) for one in arguments)


def _may_be_entered(folder: str) -> bool:
    """Return whether the folder exists and this user may enter it; a pod's user may not enter root's home."""
    return os.path.isdir(folder) and os.access(folder, os.X_OK)


def _is_of_a_host(name: str) -> bool:
    return name in _OF_A_HOST or name.startswith(_PREFIXES_OF_A_HOST)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError(
            "cannot launch: the current folder, in which the nodes would run, was removed: change to another one"
        ) from error
