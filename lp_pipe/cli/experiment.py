"""`lp_pipe experiment`: create, show, pause, resume, fork and export searches over trials."""

import argparse
import ast
import contextlib
import csv
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from rich.live import Live
from rich.text import Text

from lp_pipe import search
from lp_pipe.cli.errors import DONE, NotAnswered, UsageError, nearest
from lp_pipe.cli.plot import charts_of_experiment, draw
from lp_pipe.cli.table import duration, table
from lp_pipe.errors import Unavailable
from lp_pipe.launch import launch
from lp_pipe.launch.run_dir import usual_runs
from lp_pipe.launch.run_records import record_in
from lp_pipe.rpc import CourierClient
from lp_pipe.search.experiment import Experiment, TrialSummary
from lp_pipe.search.space import flat
from lp_pipe.search.store import ExperimentFolder, Reading
from lp_pipe.telemetry.run_folder import RunFolder

Curves = dict[int, list[tuple[int, float]]]
_PATIENCE_S = 5.0
_WATCH_EVERY_S = 1.0
_WATCHED = 10  # of the best trials
_MLFLOW_BATCH = 1000  # metrics in one request at most
EPILOG = """\
examples:
  lp_pipe experiment create examples/search_digits.py    launch it; the same as lp_pipe launch
  lp_pipe experiment preview examples/search_digits.py   how many trials end at which step
  lp_pipe experiment ls                                  all experiments
  lp_pipe experiment show digits --watch                 its trials, while they run
  lp_pipe experiment best digits --json                  the best trial, its parameters and checkpoint
  lp_pipe experiment pause digits                        stop trials at their next report
  lp_pipe experiment resume digits                       go on, also after its launcher was killed
  lp_pipe experiment kill digits/7                       end one trial; without /7: the experiment
  lp_pipe experiment fork digits/7 --set opt.decay=0.1   the same trial with another parameter
  lp_pipe experiment export digits --csv=rows.csv

create takes the options of lp_pipe launch. ID is an experiment's folder, its name or a unique beginning of it, or - for
the newest. create and resume block until the experiment ends.
"""


HELP = "search over trials: create, show, pause, resume, export"
DESCRIPTION = "Work with experiments, which search for the best parameters over many trials."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("what", metavar="ACTION", choices=list(_ACTIONS), help=", ".join(_ACTIONS))
    parser.add_argument("id", metavar="ID", nargs="?", default="-", help="ID or ID/TRIAL; for create, preview: TARGET")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--plot", action="store_true", help="show: draw the trials' curves, too")
    parser.add_argument("--watch", action="store_true", help="show: anew every second until the experiment ends")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="fork: change a parameter")
    parser.add_argument("--from-checkpoint", action="store_true", help="fork: go on from the trial's newest checkpoint")
    parser.add_argument("--csv", nargs="?", const="-", metavar="FILE", help="export: rows as CSV (default: stdout)")
    parser.add_argument("--tensorboard", metavar="DIR", type=Path, help="export: event files, a folder per trial")
    parser.add_argument("--mlflow", metavar="URI", help="export: to a tracking server or folder, a run per trial")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Do what was asked.

    Raises:
        UsageError: there is no such experiment or trial, or it is not in the state that the action needs.
    """
    return _ACTIONS[arguments.what](arguments, program_flags)


def _preview(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    from lp_pipe.cli.targets import load_program

    program = load_program(arguments.id, program_flags)
    try:
        ends = search.preview(program)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        print(json.dumps(ends))
        return DONE
    print(table(("STEPS", "TRIALS THAT END THERE"), [(str(step), str(count)) for step, count in ends.items()]))
    print(f"{sum(ends.values())} trials, {sum(step * count for step, count in ends.items())} steps")
    return DONE


def _list(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    rows = []
    for found in _all():
        trials = found.trials()
        best = found.best()
        state = _state(found)
        if arguments.json:
            facts = {"name": found.folder.name, "state": state, "trials": len(trials), "folder": str(found.folder)}
            print(json.dumps({**facts, "best": best.value if best else None}))
        value = f"{best.value:g}" if best else ""
        rows.append((found.folder.name, state, str(len(trials)), value, str(found.folder)))
    if not arguments.json:
        head = ("NAME", "STATE", "TRIALS", "BEST", "FOLDER")
        print(table(head, rows) if rows else f"no experiments in {_home()}")
    return DONE


def _show(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    found, trial = _find(arguments.id)
    curves = found.curves()
    chosen = [one for one in found.trials() if trial in (None, one.id)]
    if arguments.json:
        for one in chosen:
            print(json.dumps({**_facts(one), "curve": curves.get(one.id, [])}))
        return DONE
    if arguments.watch:
        _watch(found)
        return DONE
    print(f"{found.folder.name}: {_state(found)}, {len(chosen)} trials, folder {found.folder}")
    print(_trials_table(chosen, curves))
    if arguments.plot and any(curves.values()):
        print()
        draw(found.folder.name, charts_of_experiment(found.folder), None)
    for one in chosen:
        if one.error:
            print(f"\ntrial {one.id} {one.state}: {one.error.strip() if trial is not None else _last_line(one.error)}")
    return DONE


def _trials_table(trials: Sequence[TrialSummary], curves: Curves) -> str:
    rows = [
        (str(one.id), one.state, str(one.step), _last(curves, one), str(one.attempts), _text(one.params))
        for one in trials
    ]
    return table(("TRIAL", "STATE", "STEP", "VALUE", "ATTEMPTS", "PARAMETERS"), rows)


def _watch(found: Experiment) -> None:
    """Show the running trials and those with the best values, anew every second until the experiment has ended."""
    with Live(auto_refresh=False) as live:
        while True:
            state = _state(found)
            trials, curves, best = found.trials(), found.curves(), found.best_values()
            best_ids = [trial for trial, *_ in best[:_WATCHED]]
            shown = [one for one in trials if one.state == "running" or one.id in best_ids]
            text = f"{_progress(found, state, best)}\n{_trials_table(shown, curves)}"
            live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            if state in ("ended", "stopped"):
                return
            time.sleep(_WATCH_EVERY_S)


def _progress(found: Experiment, state: str, best: Sequence[tuple[int, int, float]]) -> str:
    """Return a line with the steps that have run and will run if no trial fails, and when the last one will."""
    rows = found.rows()
    done, due = len({(row.trial, row.step) for row in rows}), found.steps_due()
    parts = [f"{found.folder.name}: {state}", f"{done} of {due} steps"]
    if best:
        parts.append(f"best {best[0][2]:g} in trial {best[0][0]}")
    if state == "running" and 1 < done < due:
        per_step_s = (rows[-1].time - rows[0].time) / (done - 1)
        parts.append(f"about {duration(per_step_s * (due - done))} left")
    return ", ".join(parts)


def _compare(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    found, _ = _find(arguments.id)
    best = found.best_values()
    trials = {one.id: one for one in found.trials()}
    if arguments.json:
        for trial, step, value in best:
            print(json.dumps({**_facts(trials[trial]), "value": value, "at": step}))
        return DONE
    names = list(dict.fromkeys(name for one in trials.values() for name in flat(one.params)))
    rows = []
    for trial, step, value in best:
        values = flat(trials[trial].params)
        rows.append((str(trial), f"{value:g}", str(step), *(_short(values.get(name, "")) for name in names)))
    print(table(("TRIAL", "VALUE", "AT STEP", *names), rows))
    return DONE


def _best(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    found, _ = _find(arguments.id)
    best = found.best()
    if best is None:
        raise UsageError(f"experiment {found.folder.name} has no value yet")
    checkpoint = str(best.checkpoint) if best.checkpoint else None
    if arguments.json:
        params = json.loads(json.dumps(best.params, default=repr))
        print(json.dumps({"trial": best.trial, "value": best.value, "params": params, "checkpoint": checkpoint}))
        return DONE
    print(f"trial {best.trial}: {best.value:g} with {_text(best.params)}")
    print(f"checkpoint: {checkpoint or 'none was kept'}")
    return DONE


def _logs(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print what slots have printed; for one trial, the lines between its marks."""
    found, trial = _find(arguments.id)
    with closing(Reading(found.folder, None)) as reading:
        run_dir = Path(reading.facts()["run_dir"])
    logs = {node: path for node, path in RunFolder(run_dir).node_logs().items() if node.startswith("slots/")}
    if not logs:
        raise UsageError(f"its run {run_dir} has no logs of slots: nodes that are threads have none")
    for node, path in sorted(logs.items()):
        is_wanted = trial is None
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("trial ") and ", attempt " in line:
                is_wanted = trial is None or line.startswith(f"trial {trial}, attempt ")
            if is_wanted:
                print(f"[{node}] {line}")
    return DONE


def _pause(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    found, _ = _find(arguments.id)
    client = _searcher(found)
    client.pause()
    deadline = time.monotonic() + _PATIENCE_S
    while client.state() == "pausing" and time.monotonic() < deadline:
        time.sleep(0.05)
    print(f"experiment {found.folder.name} is {client.state()}: lp_pipe experiment resume {found.folder.name}")
    return DONE


def _resume(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    found, _ = _find(arguments.id)
    owner = ExperimentFolder(found.folder).owner()
    if owner is not None:
        if not _searcher(found).resume():
            raise UsageError(f"experiment {found.folder.name} runs already, in process {owner}, and is not paused")
        print(f"experiment {found.folder.name} goes on")
        return DONE
    with closing(Reading(found.folder, None)) as reading:
        run_dir = Path(reading.facts()["run_dir"])
    record = record_in(run_dir)
    if record is None:
        raise UsageError(f"the folder of its last run, {run_dir}, is gone: launch its program again; it goes on")
    if record.flags.get("target"):
        from lp_pipe.cli.main import main

        return main(["launch", f"--resume={run_dir}", *(["--json"] if arguments.json else [])])
    return subprocess.call([sys.executable, *record.argv], cwd=record.cwd or None)


def _kill(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    found, trial = _find(arguments.id)
    _searcher(found).kill(trial)
    print(f"{'experiment' if trial is None else f'trial {trial} of'} {found.folder.name} is ended")
    return DONE


def _fork(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    found, trial = _find(arguments.id)
    if trial is None:
        raise UsageError(f"name the trial: lp_pipe experiment fork {found.folder.name}/TRIAL --set NAME=VALUE")
    changes = {}
    for text in arguments.set:
        name, is_given, value = text.partition("=")
        if not is_given:
            raise UsageError(f"--set {text}: give NAME=VALUE, such as --set opt.decay=0.1")
        try:
            changes[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changes[name] = value
    try:
        program = search.fork(found, trial, changes, from_checkpoint=arguments.from_checkpoint)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(program.name, flush=True)
    launch(program, mode="process").wait()
    return DONE


def _collect(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Delete checkpoints on the disk that the experiment does not name."""
    found, _ = _find(arguments.id)
    with closing(Reading(found.folder, None)) as reading:
        named = {Path(path).resolve() for path, *_ in reading.checkpoints()}
    left = [path for path in found.folder.glob("trials/*/checkpoints/attempt-*/*") if path.resolve() not in named]
    if ExperimentFolder(found.folder).owner() is not None:
        raise UsageError(f"experiment {found.folder.name} runs, and deletes what it does not keep by itself")
    for path in left:
        shutil.rmtree(path)
        print(f"removed {path}")
    print(f"{len(named)} checkpoints are kept")
    return DONE


def _export(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    found, _ = _find(arguments.id)
    if arguments.tensorboard is not None:
        _to_tensorboard(found, arguments.tensorboard)
    if arguments.mlflow is not None:
        _to_mlflow(found, arguments.mlflow)
    if arguments.csv is not None or (arguments.tensorboard is None and arguments.mlflow is None):
        _to_csv(found, arguments.csv or "-")
    return DONE


def _to_csv(found: Experiment, path: str) -> None:
    def write(file: TextIO) -> None:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("trial", "step", "name", "value"))
        writer.writerows(row[:4] for row in found.rows())

    if path == "-":
        write(sys.stdout)
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        write(file)


def _to_tensorboard(found: Experiment, folder: Path) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(f"--tensorboard needs torch and tensorboard: pip install tensorboard ({error})") from error
    rows = found.rows()
    for one in found.trials():
        with SummaryWriter(str(folder / f"trial-{one.id}")) as writer:
            last: dict[str, float] = {}
            for row in (row for row in rows if row.trial == one.id):
                writer.add_scalar(row.name, row.value, row.step, walltime=row.time)
                last[row.name] = row.value
            params = {name: value if _is_plain(value) else repr(value) for name, value in flat(one.params).items()}
            writer.add_hparams(params, {f"last/{name}": value for name, value in last.items()}, run_name=".")
    print(f"wrote {folder}: tensorboard --logdir {folder}", file=sys.stderr)


def _to_mlflow(found: Experiment, uri: str) -> None:
    try:
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise UsageError(f"--mlflow needs MLflow: pip install mlflow-skinny ({error})") from error
    try:
        client = MlflowClient(tracking_uri=uri)
    except MlflowException as error:
        raise UsageError(f"--mlflow {uri}: {error}") from error
    known = client.get_experiment_by_name(found.folder.name)
    experiment = known.experiment_id if known else client.create_experiment(found.folder.name)
    rows = found.rows()
    for one in found.trials():
        run = client.create_run(experiment, run_name=f"trial-{one.id}").info.run_id
        params = [Param(name, str(value)) for name, value in flat(one.params).items()]
        metrics = [Metric(row.name, row.value, int(row.time * 1e3), row.step) for row in rows if row.trial == one.id]
        client.log_batch(run, params=params)
        for first in range(0, len(metrics), _MLFLOW_BATCH):
            client.log_batch(run, metrics=metrics[first : first + _MLFLOW_BATCH])
        client.set_terminated(run, "FAILED" if one.state in ("failed", "invalid") else "FINISHED")
    print(f"wrote {len(found.trials())} runs to {uri}", file=sys.stderr)


def _find(text: str) -> tuple[Experiment, int | None]:
    """Return the experiment, and the trial, if the text names one.

    Raises:
        UsageError: there is none, or there are several.
    """
    name, slash, last = text.rpartition("/")
    if slash and last.isdecimal() and not Path(text).is_dir():
        found, _ = _find(name)
        if all(one.id != int(last) for one in found.trials()):
            raise UsageError(f"experiment {found.folder.name} has no trial {last} that has started")
        return found, int(last)
    if ExperimentFolder(Path(text)).database.exists():
        return search.open(Path(text).resolve()), None
    known = {one.folder.name: one for one in _all()}
    if text == "-" and known:
        return max(known.values(), key=lambda one: one.folder.stat().st_mtime), None
    matching = [text] if text in known else [name for name in known if name.startswith(text)]
    if len(matching) == 1:
        return known[matching[0]], None
    if matching:
        raise UsageError(f"{text!r} is the beginning of several experiments: {', '.join(sorted(matching))}")
    hint = nearest(text, known) or f"; there are {', '.join(known) or 'none'}"
    raise UsageError(f"no experiment {text!r} in {_home()}{hint}")


def _searcher(found: Experiment) -> Any:
    """Return a client of the live experiment's searcher.

    Raises:
        UsageError: it is not live.
        NotAnswered: it does not answer.
    """
    if ExperimentFolder(found.folder).owner() is None:
        raise UsageError(f"experiment {found.folder.name} does not run: lp_pipe experiment resume {found.folder.name}")
    with closing(Reading(found.folder, None)) as reading:
        address = str(reading.facts()["address"])
    client = CourierClient(address, call_timeout=_PATIENCE_S, wait_for_ready=False)
    try:
        client.state()
    except Unavailable as error:
        raise NotAnswered(f"the searcher of experiment {found.folder.name} does not answer: {error}") from error
    return client


def _state(found: Experiment) -> str:
    """Return running or paused for a live one; else ended, or stopped if trials are left to run."""
    if ExperimentFolder(found.folder).owner() is not None:
        return str(_searcher(found).state())
    return "ended" if found.is_over() else "stopped"


def _home() -> Path:
    return usual_runs() / "experiments"


def _all() -> list[Experiment]:
    found = []
    for path in sorted(_home().glob("*/experiment.sqlite")):
        with contextlib.suppress(FileNotFoundError):  # it is about to start
            found.append(search.open(path.parent))
    return found


def _facts(one: TrialSummary) -> dict[str, Any]:
    facts = {**one._asdict(), "checkpoint": str(one.checkpoint) if one.checkpoint else None}
    return json.loads(json.dumps(facts, default=repr))  # type: ignore[no-any-return]


def _last(curves: Curves, one: TrialSummary) -> str:
    curve = curves.get(one.id)
    return f"{curve[-1][1]:g}" if curve else ""


def _text(params: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in flat(params).items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | bool)


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1]


_ACTIONS: dict[str, Callable[[argparse.Namespace, Sequence[str]], int]] = {
    "preview": _preview,
    "ls": _list,
    "show": _show,
    "compare": _compare,
    "best": _best,
    "logs": _logs,
    "pause": _pause,
    "resume": _resume,
    "kill": _kill,
    "fork": _fork,
    "gc": _collect,
    "export": _export,
}
USAGE = f"lp_pipe experiment create|{'|'.join(_ACTIONS)} [ID] [options]"
