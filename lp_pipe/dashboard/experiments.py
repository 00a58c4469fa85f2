"""What the page asks about experiments: their trials, curves and best values; and its buttons pause, kill and fork."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lp_pipe import search
from lp_pipe.errors import DeadlineExceeded, LpPipeError
from lp_pipe.rpc import CourierClient
from lp_pipe.search.space import flat
from lp_pipe.search.store import ExperimentFolder, Reading, read_only

_PATIENCE_S = 5.0
_CURVE_POINTS = 500


class ExperimentView:
    """One experiment's folder. Its file has pickles, so the file must be this user's own.

    Raises (constructor):
        PermissionError: the file is another user's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        database = ExperimentFolder(folder).database
        if database.is_symlink() or database.stat().st_uid != os.getuid():
            raise PermissionError(f"{database} is another user's, and loading it would run what is in it")

    def version(self) -> str:
        """Return a text that changes with every commit."""
        found = []
        database = ExperimentFolder(self.folder).database
        for path in (database, database.with_name(f"{database.name}-wal")):
            try:
                stat = path.stat()
                found.append(f"{stat.st_mtime_ns}.{stat.st_size}")
            except OSError:
                found.append("")
        return "-".join([*found, str(ExperimentFolder(self.folder).owner() or "")])

    def run_dir(self) -> str:
        """Return the folder of the run that is or was its newest launch."""
        with closing(read_only(self.folder)) as db:
            row = db.execute("SELECT value FROM facts WHERE name='run_dir'").fetchone()
        return str(row[0]) if row else ""

    def summary(self) -> dict[str, Any]:
        """Return its name and state, the best value, and every trial with its curve."""
        found = search.open(self.folder)
        curves = found.curves()
        best = {trial: (value, step) for trial, step, value in found.best_values()}
        with closing(Reading(self.folder, None)) as reading:
            is_paused = reading.is_paused()
        owner = ExperimentFolder(self.folder).owner()
        ended = "ended" if found.is_over() else "stopped"
        searcher = found.searcher
        return {
            "name": self.folder.name,
            "folder": str(self.folder),
            "state": ended if owner is None else "paused" if is_paused else "running",
            "metric": searcher.metric,
            "mode": searcher.mode,
            "best": next(iter(best), None),
            "trials": [
                {
                    "id": one.id,
                    "state": one.state,
                    "step": one.step,
                    "attempts": one.attempts,
                    "error": one.error,
                    "params": {name: _plain(value) for name, value in flat(one.params).items()},
                    "best": _plain(best[one.id][0]) if one.id in best else None,
                    "best_step": best[one.id][1] if one.id in best else None,
                    "curve": _thinned(curves.get(one.id, [])),
                }
                for one in found.trials()
            ],
        }

    def act(self, action: str, trial: int | None, changes: Sequence[str]) -> str:
        """Pause, resume, kill or fork; return what has happened.

        Raises:
            ValueError: there is no such action, the experiment does not run, or it does not answer.
        """
        if action == "fork":
            return self._fork(trial, changes)
        if action not in ("pause", "resume", "kill"):
            raise ValueError(f"no action {action!r}")
        if ExperimentFolder(self.folder).owner() is None:
            raise ValueError(f"experiment {self.folder.name} does not run")
        with closing(Reading(self.folder, None)) as reading:
            address = str(reading.facts()["address"])
        client = CourierClient(address, call_timeout=_PATIENCE_S, wait_for_ready=False)
        try:
            client.kill(trial) if action == "kill" else getattr(client, action)()
        except (LpPipeError, DeadlineExceeded, KeyError) as error:
            raise ValueError(f"experiment {self.folder.name} has not done that: {error}") from error
        return f"{action}: {self.folder.name}{'' if trial is None else f', trial {trial}'}"

    def _fork(self, trial: int | None, changes: Sequence[str]) -> str:
        """Start `lp_pipe experiment fork` in a process of its own, which outlives this one."""
        if trial is None or any("=" not in one for one in changes):
            raise ValueError("a fork needs a trial, and changes as NAME=VALUE")
        options = [word for change in changes for word in ("--set", change)]
        command = [sys.executable, "-m", "lp_pipe", "experiment", "fork", f"{self.folder}/{trial}", *options]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert child.stdout is not None
        first = child.stdout.readline().decode(errors="replace").strip()
        # It prints until its end: its output must be read, or it would stop.
        threading.Thread(target=child.communicate, name="output of a fork", daemon=True).start()
        if first.startswith("lp_pipe:"):
            raise ValueError(first)
        return f"forked: {first}"


def experiments_in(places: Sequence[Path]) -> Iterator[ExperimentView]:
    """Yield the experiments whose folders are these, or in these, that this user may read."""
    seen = set()
    for place in places:
        for database in (ExperimentFolder(place).database, *sorted(place.glob("*/experiment.sqlite"))):
            folder = database.parent.resolve()
            if folder in seen or not database.is_file():
                continue
            seen.add(folder)
            try:
                yield ExperimentView(folder)
            except OSError:
                continue


def _thinned(curve: list[tuple[int, float]]) -> list[list[Any]]:
    """Return at most 500 points of a curve, its first and last among them."""
    every = max(1, math.ceil(len(curve) / _CURVE_POINTS))
    kept = curve[::every]
    if curve and kept[-1] != curve[-1]:
        kept.append(curve[-1])
    return [[step, _plain(value)] for step, value in kept]


def _plain(value: Any) -> Any:
    """Return a value that JSON has; a text for any other."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)
