"""What nodes find around them: environment, folder, import path, arguments; as they are at launch()."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

# What describes a host or a login there, not the program.
_OF_A_HOST = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "HOST", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "TERM"),
        *("MAIL", "DISPLAY", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH"),
        "CUDA_VISIBLE_DEVICES",
    ]
)
_PREFIXES_OF_A_HOST = ("SSH_", "XDG_", "DBUS_", "SLURM", "KUBERNETES_", "RAY_", "LP_PIPE_TEMPLATE")


@dataclass(frozen=True)
class Surroundings:
    """Picklable: travels to the agents of other hosts."""

    environment: Mapping[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    log_level: int

    @classmethod
    def here(cls) -> Self:
        """Of this process, now."""
        level = logging.getLogger().getEffectiveLevel()
        return cls(dict(os.environ), os.getcwd(), tuple(sys.path), tuple(sys.argv), level)

    def on_this_host(self) -> "Surroundings":
        """Those of a launcher elsewhere, as far as they make sense here; the rest is this process's own.

        This interpreter's import path comes first; of the launcher's, folders that exist here too (shared ones).
        """
        theirs = {name: value for name, value in self.environment.items() if not _is_of_a_host(name)}
        ours = {name: value for name, value in os.environ.items() if _is_of_a_host(name)}
        cwd = self.cwd if os.path.isdir(self.cwd) else os.getcwd()
        paths = dict.fromkeys([*sys.path, *(path for path in self.sys_path if os.path.isdir(path))])
        return Surroundings({**theirs, **ours}, cwd, tuple(paths), self.argv, self.log_level)


def _is_of_a_host(name: str) -> bool:
    return name in _OF_A_HOST or name.startswith(_PREFIXES_OF_A_HOST)
