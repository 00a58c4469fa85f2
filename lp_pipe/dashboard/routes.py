"""What each URL of the page answers: a table of queries, of actions, and the stream of what is new."""

import contextlib
import hashlib
import json
import logging
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lp_pipe.dashboard.experiments import ExperimentView, experiments_in
from lp_pipe.dashboard.metrics_index import AXES, MAX_BUCKETS
from lp_pipe.dashboard.run_view import RunView, state_of, summary_of
from lp_pipe.errors import LpPipeError
from lp_pipe.launch.open_metrics import open_metrics_text
from lp_pipe.launch.run_records import RunRecord
from lp_pipe.process_tree import owner_of
from lp_pipe.rpc import CourierClient

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_BEAT_S = 0.5  # the page takes 1.5 s of silence for a lost server
_PATIENCE_S = 5.0
_STACKS_PATIENCE_S = 30.0
_KEPT_VIEWS = 8
_LISTED_RUNS = 200
_TRACE_PATIENCE_S = 120.0


Asked = Mapping[str, str]


class NotFound(Exception):
    """No such page, run, node or experiment."""


class WrongRequest(Exception):
    """A parameter that cannot be read, or an action that cannot be done now."""


class Routes:
    """Answers the queries of the page.

    find_runs: returns the records of all runs that may be shown. experiment_places: folders with experiments, or of
    some. single: the folder of the run that was asked for; None where the page shows several.
    """

    def __init__(
        self,
        find_runs: Callable[[], Iterable[RunRecord]],
        experiment_places: Callable[[], Sequence[Path]],
        single: Path | None = None,
        *,
        is_read_only: bool = False,
    ) -> None:
        self._find_runs = find_runs
        self._experiment_places = experiment_places
        self._single = single
        self._is_read_only = is_read_only
        self._views: OrderedDict[str, RunView] = OrderedDict()  # by folder, the last used at the end
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}  # folders by key
        self._queries: dict[str, Callable[[Asked], Any]] = {
            "/api/begin": self._begin,
            "/api/runs": self._runs,
            "/api/run": self._run,
            "/api/names": lambda asked: self._view(asked).metrics.names(),
            "/api/series": self._series,
            "/api/after": self._after,
            "/api/log": self._log,
            "/api/stacks": self._stacks,
            "/api/events": lambda asked: self._view(asked).events_after(0)[1],
            "/api/failure": lambda asked: {"text": self._view(asked).failure()},
            "/api/hangs": lambda asked: self._view(asked).hangs(),
            "/api/checkpoints": lambda asked: self._view(asked).checkpoints(),
            "/api/timeline": lambda asked: self._view(asked).timeline(asked.get("trace")),
            "/api/experiments": self._experiments,
            "/api/experiment": self._experiment,
        }
        self._actions: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "/api/experiment": self._act,
            "/api/trace": self._trace,
        }

    def get(self, path: str, asked: Asked) -> Any:
        """Return the answer to a query.

        Raises:
            NotFound, WrongRequest: with a message for the page.
        """
        query = self._queries.get(path)
        if query is None:
            raise NotFound("there is no such page")
        return query(asked)

    def post(self, path: str, said: Mapping[str, Any]) -> Any:
        """Do what a button asks for; raises as `get`."""
        action = self._actions.get(path)
        if action is None:
            raise NotFound("there is no such action")
        return action(said)

    def stream(self, asked: Asked, is_closing: threading.Event) -> Iterator[Mapping[str, Any]]:
        """Yield what is new in a run until the generator is closed. Something is yielded twice a second, at least."""
        view = self._view(asked)
        changes = _Changes(view)
        watch: _LiveWatch | None = None
        try:
            yield {"kind": "hello", "time": time.time()}
            beat = time.monotonic()
            while not is_closing.is_set():
                record = view.record()
                if record is None:
                    yield {"kind": "gone"}
                    return
                if watch is None and _may_ask(record):
                    watch = _LiveWatch(record)
                news = [*changes.look(record, watch), *(watch.taken() if watch is not None else ())]
                yield from news
                if not news and time.monotonic() >= beat + _BEAT_S:
                    yield {"kind": "beat"}
                if news or time.monotonic() >= beat + _BEAT_S:
                    beat = time.monotonic()
                is_closing.wait(_LOOK_EVERY_S)
        finally:
            if watch is not None:
                watch.is_over.set()

    def open_metrics(self) -> str:
        """Return the state of the newest run as OpenMetrics text."""
        key = next(iter(self._listed()), "")
        record, view = self._record({"run": key}), self._view({"run": key})
        metrics = {
            (one["node"], one["name"]): math.nan if one["last"] is None else one["last"] for one in view.metrics.names()
        }
        if _may_ask(record):
            with contextlib.suppress(LpPipeError):
                control = _control(record, _PATIENCE_S)
                return open_metrics_text(control.status(), control.traffic(), metrics)
        status: dict[str, list[dict[str, Any]]] = {}
        for node, row in view.states(record).items():
            status.setdefault(node.rpartition("/")[0], []).append(row)
        return open_metrics_text(status, [], metrics)

    # Runs.

    def _listed(self) -> dict[str, RunRecord]:
        """Return the runs by key, the newest first. A key is the name of the folder, with a hash where two share it."""
        records = sorted(self._find_runs(), key=lambda record: record.started, reverse=True)
        names = [record.name for record in records]
        found = {}
        for record in records:
            name = record.name
            found[name if names.count(name) == 1 else f"{name}~{_digest(record.run_dir)}"] = record
        with self._lock:
            self._known.update({key: record.run_dir for key, record in found.items()})
        return found

    def _view(self, asked: Asked) -> RunView:
        key = asked.get("run", "")
        if key not in self._known:
            self._listed()
        folder = self._known.get(key)
        if folder is None:
            raise NotFound(f"there is no run {key!r}")
        with self._lock:
            view = self._views.pop(folder, None) or RunView(Path(folder), is_read_only=self._is_read_only)
            self._views[folder] = view
            while len(self._views) > _KEPT_VIEWS:
                self._views.popitem(last=False)
        return view

    def _record(self, asked: Asked) -> RunRecord:
        record = self._view(asked).record()
        if record is None:
            raise NotFound(f"the folder of run {asked.get('run')!r} is gone")
        return record

    def _runs(self, asked: Asked) -> Any:
        rows = [summary_of(key, record) for key, record in list(self._listed().items())[:_LISTED_RUNS]]
        single = str(self._single.resolve()) if self._single is not None else None
        first = next((row["key"] for row in rows if row["run_dir"] == single), rows[0]["key"] if rows else None)
        return {"runs": rows, "first": first, "single": single is not None, "read_only": self._is_read_only}

    def _begin(self, asked: Asked) -> Any:
        """Return the runs and all of the first one, which a page needs before it can draw."""
        found = self._runs(asked)
        try:
            run = None if found["first"] is None else self._run({"run": found["first"]})
        except NotFound:  # its folder was just removed
            run = None
        return {**found, "run": run}

    def _run(self, asked: Asked) -> Any:
        record, view = self._record(asked), self._view(asked)
        return {
            **summary_of(asked["run"], record),
            "states": view.states(record),
            "scene": view.scene,
            "traces": view.traces(),
            "parent": record.parent,
        }

    def _log(self, asked: Asked) -> Any:
        found = self._view(asked).log(asked.get("node", ""), _offset(asked, "start"), _offset(asked, "end"))
        if found is None:
            raise NotFound(f"node {asked.get('node')!r} has printed nothing that is in a file")
        return found

    def _stacks(self, asked: Asked) -> Any:
        record = self._record(asked)
        if not _may_ask(record):
            raise WrongRequest("the run is not live, or another user's, so it tells no stacks")
        try:
            return {"text": _control(record, _STACKS_PATIENCE_S).stacks()}
        except LpPipeError as error:
            raise WrongRequest(f"the launcher does not answer: {error}") from error

    # Metrics.

    def _series(self, asked: Asked) -> Any:
        metrics = self._view(asked).metrics
        axis = asked.get("axis", "step")
        if axis not in AXES:
            raise WrongRequest(f"axis must be one of {', '.join(AXES)}, got {axis!r}")
        low, high = _number(asked, "low", -math.inf), _number(asked, "high", math.inf)
        buckets = int(min(max(_number(asked, "buckets", MAX_BUCKETS), 10), MAX_BUCKETS))
        end = metrics.refresh()
        return {"end": end, "series": [metrics.query(key, axis, low, high, buckets) for key in _keys(asked)]}

    def _after(self, asked: Asked) -> Any:
        keys = _keys(asked)
        end, found = self._view(asked).metrics.after(_offset(asked, "offset") or 0, set(keys))
        points = [[_finite(step), time_, value] for key in keys for step, time_, value in found.get(key, ())]
        sizes = [len(found.get(key, ())) for key in keys]
        return {"end": end, "points": points, "sizes": sizes}

    # Experiments.

    def _views_of_experiments(self) -> dict[str, ExperimentView]:
        found: dict[str, ExperimentView] = {}
        for one in experiments_in(self._experiment_places()):
            name = one.folder.name
            found[name if name not in found else f"{name}~{_digest(str(one.folder))}"] = one
        return found

    def _experiments(self, asked: Asked) -> Any:
        rows = []
        for key, one in self._views_of_experiments().items():
            try:
                rows.append({"key": key, "name": one.folder.name, "run_dir": one.run_dir()})
            except Exception as error:  # of a file that is no experiment's, or is being made
                rows.append({"key": key, "name": one.folder.name, "error": str(error)})
        return rows

    def _experiment_of(self, key: Any) -> ExperimentView:
        found = self._views_of_experiments().get(key)
        if found is None:
            raise NotFound(f"there is no experiment {key!r}")
        return found

    def _experiment(self, asked: Asked) -> Any:
        one = self._experiment_of(asked.get("id"))
        version = one.version()
        if asked.get("version") == version:
            return {"version": version}
        try:
            return {"version": version, **one.summary()}
        except Exception as error:  # what its file has pickled may not load here
            raise WrongRequest(f"experiment {one.folder.name} cannot be read: {error}") from error

    def _act(self, said: Mapping[str, Any]) -> Any:
        trial, changes = said.get("trial"), said.get("set", [])
        is_wrong = not isinstance(trial, int | None) or not isinstance(changes, list)
        if is_wrong or not all(isinstance(one, str) for one in changes):
            raise WrongRequest("trial must be a number, set a list of NAME=VALUE")
        try:
            return {"done": self._experiment_of(said.get("id")).act(str(said.get("action")), trial, changes)}
        except ValueError as error:
            raise WrongRequest(str(error)) from error

    def _trace(self, said: Mapping[str, Any]) -> Any:
        """Trace the next step of a live run, as `lp_pipe trace` does, into its folder."""
        record = self._record({"run": str(said.get("run"))})
        if not record.is_live:
            raise WrongRequest("the run is not live, so no step can be traced")
        command = [sys.executable, "-m", "lp_pipe", "trace", record.run_dir, "-n", "1"]
        command += ["-o", str(Path(record.run_dir) / "trace-ui.json")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TRACE_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise WrongRequest(f"no step has ended within {_TRACE_PATIENCE_S:.0f} s") from error
        if done.returncode:
            raise WrongRequest(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it has failed")
        return {"done": "traced one step"}


class _Changes:
    """Finds what has changed in a run's folder since the last look."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._states: dict[str, Any] = {}
        self._state = ""
        self._num_events = 0
        self._size = -1

    def look(self, record: RunRecord, watch: "_LiveWatch | None") -> Iterator[Mapping[str, Any]]:
        """Yield a message for each kind of thing that has changed."""
        if (state := state_of(record)) != self._state:
            self._state = state
            yield {"kind": "run", "state": state, "ended": record.ended, "failure": record.failure}
        states = self._view.states(record)
        live = watch.rows if watch is not None and state == "running" else {}
        for name, row in live.items():
            states[name] = {**states.get(name, {}), **row}
        changed = {name: row for name, row in states.items() if self._states.get(name) != row}
        if changed:
            self._states = states
            yield {"kind": "states", "states": changed}
        self._num_events, events = self._view.events_after(self._num_events)
        if events:
            yield {"kind": "events", "events": events}
        try:
            size = self._view.folder.metrics.lstat().st_size
        except OSError:
            size = 0
        if size != self._size:
            self._size = size
            yield {"kind": "metrics", "size": size}


class _LiveWatch:
    """Follows a live launcher by its `Control`, in a thread, until `is_over` is set or the launcher's end.

    rows: what Run.status says of each node.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self.is_over = threading.Event()
        self._messages: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.rows: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._follow, name="follow a run", daemon=True).start()

    def taken(self) -> Iterator[Mapping[str, Any]]:
        """Yield the messages since the last call."""
        while not self._messages.empty():
            yield self._messages.get()

    def _follow(self) -> None:
        """Take the launcher's messages; those of files are left out, because the page reads the files themselves."""
        try:
            for message in _control(self._record, _PATIENCE_S).watch():
                if self.is_over.is_set():
                    return
                if message["kind"] == "states":
                    self.rows = {**self.rows, **message["states"]}
                elif message["kind"] == "live":
                    self._messages.put(message)
        except LpPipeError as error:
            _log.debug("run %s no longer answers: %s", self._record.name, error)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _may_ask(record: RunRecord) -> bool:
    """Return whether the launcher is live and this user's: a run.json may be anyone's, and name any socket."""
    return record.is_live and bool(record.control) and owner_of(record.pid) in (None, os.getuid())


def _control(record: RunRecord, patience_s: float) -> CourierClient:
    return CourierClient(record.control, call_timeout=patience_s, wait_for_ready=False, peer=record.name)


def _keys(asked: Asked) -> list[tuple[str, str]]:
    """Return the series that are asked for: `keys` is a JSON list of [node, name]."""
    try:
        return [(str(node), str(name)) for node, name in json.loads(asked.get("keys", "[]"))]
    except (ValueError, TypeError) as error:
        raise WrongRequest(f"keys must be a JSON list of [node, name]: {error}") from None


def _number(asked: Asked, name: str, default: float) -> float:
    try:
        found = float(asked.get(name, default))
    except ValueError:
        raise WrongRequest(f"{name} must be a number, got {asked[name]!r}") from None
    return default if math.isnan(found) else found


def _offset(asked: Asked, name: str) -> int | None:
    text = asked.get(name, "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 19):
        raise WrongRequest(f"{name} must be an offset, got {text!r}")
    return int(text) if text else None


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
