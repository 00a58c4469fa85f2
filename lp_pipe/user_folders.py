"""The user's folders for state and caches, also for accounts without a home folder."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from lp_pipe.errors import LaunchError


def state_folder() -> Path:
    """Return `$XDG_STATE_HOME/lp_pipe`, by default below the home folder.

    Raises:
        LaunchError: there is no home folder, and the folder used instead belongs to another user.
    """
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/lp_pipe`, by default below the home folder.

    Raises:
        LaunchError: as `state_folder`.
    """
    return _folder("XDG_CACHE_HOME", ".cache")


def is_temporary(folder: Path) -> bool:
    """Return whether a folder is below the temporary one that replaces a missing home folder."""
    return folder.is_relative_to(_instead_of_home())


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter.

    Raises:
        OSError: it cannot be made, or another user has made it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)


def _folder(variable: str, below_home: str) -> Path:
    named = os.environ.get(variable)
    if named:
        return Path(named) / "lp_pipe"
    with contextlib.suppress(RuntimeError):  # HOME is not set, and the system does not know the user
        folder = Path.home() / below_home / "lp_pipe"
        if _can_be_made(folder):
            return folder
    instead = _instead_of_home()
    try:
        make_private(instead)
        if stat.S_ISLNK(instead.lstat().st_mode):
            raise PermissionError(f"{instead} is a link")
    except OSError as error:
        raise LaunchError(
            f"there is no writable home folder, and {instead} cannot be used instead ({error}): set {variable} to a "
            "writable folder"
        ) from error
    return instead / Path(below_home).name.removeprefix(".")


def _can_be_made(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return False


def _instead_of_home() -> Path:
    """Return the replacement for a home folder; the same for all of this user's processes with the same TMPDIR."""
    return Path(tempfile.gettempdir()) / f"lp_pipe-{os.getuid()}"
