"""Which runs of this user there are: one file each in a private folder, and `run.json` in each run's own folder.

The private folder is always below the user's state folder, and not in $XDG_RUNTIME_DIR: a run that cron has started
and the terminal that asks for it must agree on it, and only some of them have that variable.
"""

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lp_pipe.connections import unix
from lp_pipe.launch.processes.proctree import start_time
from lp_pipe.telemetry.whole_file import write_whole

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunRecord:
    """What another process must know to ask a run, and to clean up after it.

    pid: the launcher's; a pid alone may be another process's by now, so its `start_time` is kept with it.
    started, ended: seconds since the epoch; `ended` is only ever set in `run.json`.
    control: where it answers (see control.py), inside `socket_dir`.
    mark: the value of LP_PIPE_TEMPLATE that its node processes carry; "" in thread mode.
    """

    program: str
    mode: str
    run_dir: str
    host: str
    pid: int
    pid_started: int
    started: float
    control: str
    socket_dir: str
    mark: str = ""
    ended: float | None = None

    @property
    def name(self) -> str:
        """The last part of the run's folder."""
        return Path(self.run_dir).name

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this host; of others (a shared home) nothing can be said."""
        return self.host == socket.gethostname()

    @property
    def is_live(self) -> bool:
        return self.ended is None and self.is_here and start_time(self.pid) == self.pid_started


class Entry:
    """A run's two files: the one among the live runs is removed at its end, the one in its own folder stays."""

    def __init__(self, record: RunRecord) -> None:
        """Write both, or none.

        Raises:
            OSError: a folder cannot be written, or the folder of live runs is another user's.
        """
        self._record = record
        self._own = Path(record.run_dir) / RUN_FILE
        self._live = _private(live_folder()) / f"{record.pid}-{uuid.uuid4().hex[:12]}.json"
        _write(self._live, record)
        try:
            _write(self._own, record)
        except OSError:
            self._live.unlink()
            raise

    def end(self, when: float) -> None:
        """The run is over; `when` in seconds since the epoch."""
        with contextlib.suppress(OSError):  # the folder was removed, or its disk is full: it is over all the same
            _write(self._own, replace(self._record, ended=when))
        with contextlib.suppress(OSError):
            self._live.unlink()


def live_folder() -> Path:
    """$XDG_STATE_HOME/lp_pipe/live."""
    return user_folder() / "live"


def user_folder() -> Path:
    """$XDG_STATE_HOME/lp_pipe: what this user's runs leave for other processes to find."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "lp_pipe"


def entries() -> dict[Path, RunRecord]:
    """Every run of this host that has an entry, live or dead, oldest first."""
    found = dict(_readable(live_folder()))
    return dict(sorted(found.items(), key=lambda item: item[1].started))


def dead_entries() -> dict[Path, RunRecord]:
    """Those whose launchers were killed. One that ends in order takes its entry back, maybe just after it was read."""
    return {path: record for path, record in entries().items() if not record.is_live and path.exists()}


def read_record(path: Path) -> RunRecord | None:
    """What such a file says; None when there is none, or none of ours.

    Anybody may have written the one in a run's folder. Whoever answers at `control` is believed, so it must be a unix
    socket, of which the kernel says whose it is.
    """
    try:
        record = RunRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return record if str(record.control).startswith(unix.SCHEME) else None


def _readable(folder: Path) -> Iterator[tuple[Path, RunRecord]]:
    for path in folder.glob("*.json"):
        record = read_record(path)
        if record is not None and record.is_here:
            yield path, record


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)
    return folder


def _write(path: Path, record: RunRecord) -> None:
    """Whole or not at all: others read it at any time."""
    write_whole(path, json.dumps(asdict(record), indent=1) + "\n")
