"""`lp_pipe launch`: start a program, show its output and metrics, and return its exit status."""

import argparse
import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from lp_pipe.checkpoint import checkpoints_in
from lp_pipe.cli import host_options, submit
from lp_pipe.cli.display import Display, Ending, PlainDisplay, Start
from lp_pipe.cli.errors import DONE, NotLaunched, UsageError, nearest, whole_number
from lp_pipe.cli.find_run import FOLDER
from lp_pipe.cli.json_display import JsonDisplay
from lp_pipe.cli.live_display import LiveDisplay
from lp_pipe.cli.output import Output
from lp_pipe.cli.plan_options import add_plan_options, load_planned
from lp_pipe.cli.resume import invocation_of, resumed
from lp_pipe.cli.streams import drop_unwritten
from lp_pipe.cli.targets import load_function, load_maker, load_ranks, load_sink
from lp_pipe.errors import LpPipeError, NodeError
from lp_pipe.graph import GraphView, to_svg
from lp_pipe.launch import ElasticRun, Run, launch, launch_elastic, new_run_dir
from lp_pipe.launch.at_exit import stop_active_runs
from lp_pipe.launch.cleanup import left_of, remove_if_unused
from lp_pipe.launch.debuggers import LocalDebuggers
from lp_pipe.launch.invocation import invoked_by
from lp_pipe.launch.launcher import MODES
from lp_pipe.launch.plan import logging_state
from lp_pipe.launch.run_records import RunRecord
from lp_pipe.launch.signals import Terminated
from lp_pipe.process_tree import kill_all
from lp_pipe.program import Program
from lp_pipe.telemetry.run_folder import RunFolder

_REFRESH_S = 0.1
EPILOG = """\
examples:
  lp_pipe launch examples/char_gpt.py
  lp_pipe launch examples/char_gpt.py --mode=thread -- --stages=3 --steps=100
  lp_pipe launch examples/char_gpt.py --mode=multi_host --engine=ssh --hosts=h1,h2:gpus=4
  lp_pipe launch examples/char_gpt.py --mode=multi_host --engine=slurm --hosts=4 --time=1:00:00
  lp_pipe launch examples/char_gpt.py --mode=multi_host --dry-run     show where each node would run
  lp_pipe launch my_train.py --mode=multi_host --engine=ssh --hosts=h1,h2,h3 --elastic=2:3
  lp_pipe launch examples/char_gpt.py -- --help          list the program's own flags
  lp_pipe launch examples/char_gpt.py --plan=plan.toml   with the stages that lp_pipe partition has planned
  lp_pipe launch --resume=runs/…                         continue an ended run from its newest checkpoint
  lp_pipe launch --nproc=2 ddp.py -- --epochs=3          run a script for torchrun as two ranks
  lp_pipe launch my_package.train:make_program --json | jq 'select(.event == "metrics")'

Ctrl+C or SIGTERM stops the nodes in order; a second one kills them. Closing the terminal (SIGHUP) also stops them in
order; `nohup lp_pipe launch … &` keeps running. Exit status: 0 done, 1 a node failed, 2 wrong usage, 3 could not launch
(also if the target's own code raised), 130 Ctrl+C, 143 SIGTERM, 129 SIGHUP.
"""


HELP = "start a program and watch it until it ends"
DESCRIPTION = "Start every node of a program, show what the nodes print and log, and wait for their end."
USAGE = "lp_pipe launch TARGET [options] [-- program flags]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="path/file.py[:name] or package.module[:name]; with --resume not needed",
    )
    parser.add_argument("--mode", type=_mode, default="process", help=f"{', '.join(MODES)} (default: process)")
    parser.add_argument(
        "--run-dir", type=_folder, metavar="DIR", help="logs, metrics, checkpoints (default: a new runs/…)"
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="continue an ended run in its folder, from its newest checkpoint (lp_pipe.checkpoint); without TARGET "
        "with the run's own target and flags",
    )
    parser.add_argument(
        "--grace", type=_grace, default=5.0, metavar="S", help="seconds from the stop to SIGTERM (default: 5)"
    )
    parser.add_argument(
        "--hang-after",
        type=_hang_limit,
        default=60.0,
        metavar="S",
        help="report nodes that wait for each other for longer than S seconds, or 'never' (default: 60)",
    )
    parser.add_argument("--setup", metavar="MODULE:FUNCTION", help="a function that runs first in every node")
    parser.add_argument(
        "--sink",
        action="append",
        default=[],
        metavar="SINK",
        help="also give metrics to tensorboard (files in the run's folder), mlflow:URI, wandb:PROJECT or a "
        "module:function of a record; may be given several times",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="record what all nodes do, into trace.json in the run's folder, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--otel",
        action="store_true",
        help="export OpenTelemetry spans of calls and steps, as the variables OTEL_EXPORTER_OTLP_… say",
    )
    parser.add_argument(
        "--metrics-port",
        type=whole_number("--metrics-port=", "port", 9090),
        metavar="PORT",
        help="serve states, calls and metrics as OpenMetrics at http://127.0.0.1:PORT/metrics (0: any free port)",
    )
    parser.add_argument(
        "--log-level",
        type=str.upper,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="level of the root logger and of absl, here and in the nodes (default: what the target sets)",
    )
    parser.add_argument(
        "--nproc",
        type=whole_number("--nproc=", "ranks per host", 2, least=1),
        metavar="N",
        help="run TARGET, a script for torchrun, as N ranks on each host, with the environment that torchrun sets",
    )
    add_plan_options(parser)
    host_options.add_arguments(parser)
    host_options.add_launch_only(parser)
    parser.add_argument("--ui", action="store_true", help="serve a page that shows the run, while it runs (lp_pipe ui)")
    parser.add_argument("--json", action="store_true", help="print events, one JSON object a line, on stdout")
    parser.set_defaults(parser=parser)


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Launch the target, here or as a job, and wait for its end; return the exit status.

    Raises:
        UsageError, NotLaunched: nothing was started.
    """
    record = None
    if arguments.resume is not None:
        if arguments.run_dir is not None:
            raise UsageError("--resume uses the run's own folder: leave --run-dir out")
        record, arguments, program_flags = resumed(arguments, program_flags)
    if arguments.target is None:
        raise UsageError("TARGET is needed: the file or module of a program; see `lp_pipe launch --help`")
    with _sigterm_like_ctrl_c(), invoked_by(invocation_of(arguments, program_flags)):
        if submit.is_wanted(arguments):
            return submit.run(arguments)
        options = host_options.launch_options(arguments)
        make, program = _load(arguments, program_flags)
        setup = load_function(arguments.setup, "--setup") if arguments.setup else None
        sinks = [load_sink(text) for text in arguments.sink]
        if arguments.log_level:
            logging_state.set_level(logging.getLevelName(arguments.log_level))
        run_dir = _run_dir(arguments, program.name, record)
        ours = run_dir if arguments.run_dir is None and arguments.resume is None else None
        with _explained(arguments.target, ours):
            view = GraphView.of(program, arguments.mode)
            plan_lines = host_options.plan_lines(program, arguments) if arguments.dry_run else []
        if arguments.dry_run:
            return _show_plan(Start(view, arguments.mode, run_dir), plan_lines, arguments.json)
        with _make_display(arguments.json) as display:
            display.starting(Start(view, arguments.mode, run_dir))
            if record is not None and not checkpoints_in(record.folder.checkpoints):
                display.note(f"starting at step 0: there is no checkpoint in {record.folder.checkpoints}")
            with display.output() as output, _none_left_behind():
                with _explained(arguments.target, ours):
                    options |= {"grace": arguments.grace, "hang_after": arguments.hang_after, "setup": setup}
                    options |= {"listed": True, "run_dir": run_dir, "metrics_sinks": (display.metrics, *sinks)}
                    options |= {"trace": arguments.trace, "otel": arguments.otel}
                    options |= {"metrics_port": arguments.metrics_port}
                    run: Run | ElasticRun
                    if make is None:
                        run = launch(program, arguments.mode, **options)
                    else:
                        run = launch_elastic(make, arguments.elastic, **options)
                with RunPage(run.run_dir) if arguments.ui else contextlib.nullcontext() as page:
                    result = _wait(run, display, view, output, page)
            with _ignore_lost_output():
                display.ended(result, run.status())
            return result.exit_status


def _load(arguments: argparse.Namespace, flags: Sequence[str]) -> tuple[Callable[[int], Program] | None, Program]:
    """Return the program and, if it is elastic, the function that makes it for a number of hosts."""
    if arguments.nproc is None:
        make = load_maker(arguments.target, flags) if arguments.elastic else None
        return make, load_planned(arguments, flags) if make is None else make(host_options.at_most(arguments))
    if arguments.mode == "thread" or arguments.plan is not None:
        other = "--plan" if arguments.plan is not None else "--mode=thread"
        raise UsageError(f"--nproc cannot be combined with {other}: each rank is a process, and a script has no plan")
    ranks = load_ranks(arguments.target, flags, arguments.nproc)
    return (
        (ranks, ranks(host_options.at_most(arguments)))
        if arguments.elastic
        else (None, ranks(host_options.count(arguments)))
    )


def _draw(view: GraphView, path: Path, display: Display) -> None:
    """Write the graph's picture into the run's folder; an error is only noted, because the run does not need it."""
    try:
        path.write_text(to_svg(view), encoding="utf-8")
    except OSError as error:
        display.note(f"cannot write {path} ({error.strerror}): the run continues without it")
        with contextlib.suppress(OSError):
            path.unlink()


def _show_plan(start: Start, lines: Sequence[str], is_json: bool) -> int:
    if is_json:
        display = JsonDisplay()
        display.starting(start)
        display.planned(lines)
    else:
        print("\n".join(lines))
    return DONE


def _run_dir(arguments: argparse.Namespace, name: str, record: RunRecord | None) -> Path:
    if record is None:
        return arguments.run_dir or new_run_dir(FOLDER, name)
    if record.program != name:
        raise UsageError(f"run {record.name} was of the program {record.program!r}, but TARGET makes {name!r}")
    kill_all(left_of(record))  # if its launcher was just killed: two runs must not write to one folder
    return Path(record.run_dir)


@contextlib.contextmanager
def _explained(target: str, new_folder: Path | None) -> Iterator[None]:
    """Turn errors of a launch into NotLaunched, and remove the new folder of a run that did not start."""
    try:
        yield
    except (LpPipeError, ValueError, TypeError, OSError, ImportError) as error:
        if new_folder is not None:
            remove_if_unused(new_folder)
        raise NotLaunched(f"cannot launch {target}: {error}") from error


@contextlib.contextmanager
def _none_left_behind() -> Iterator[None]:
    """Stop the run if a signal comes between `launch` and `_wait`.

    Otherwise it would be stopped at the process's end, when nodes fail because they can no longer print.
    """
    try:
        yield
    except KeyboardInterrupt:
        stop_active_runs()
        raise


class RunPage:
    """`lp_pipe ui` of one run, in a process of its own that ends with this one. A context manager."""

    def __init__(self, run_dir: Path) -> None:
        command = [sys.executable, "-m", "lp_pipe", "ui", str(run_dir), "--until-stdin-ends"]
        # In a session of its own: Ctrl+C stops the run, and the page shows its end.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        self._url: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_url, name="page of the run", daemon=True).start()

    def url(self) -> str:
        """Return the page's URL, once; "" before it is known."""
        return "" if self._url.empty() else self._url.get()

    def _read_url(self) -> None:
        assert self._process.stdout is not None
        self._url.put(self._process.stdout.readline().strip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def _wait(run: Run | ElasticRun, display: Display, view: GraphView, output: Output, page: RunPage | None) -> Ending:
    began = time.monotonic()
    debuggers = LocalDebuggers(run.run_dir, display.suspended)
    try:
        _draw(view, RunFolder(run.run_dir).picture, display)  # inside the try block, because the nodes run now
        display.started()
        if isinstance(run, Run) and run.metrics_url is not None:
            display.note(f"metrics at {run.metrics_url}")
        while not run.is_over:
            display.status(run.status())
            output.look()
            debuggers.look()
            if page is not None and (url := page.url()):
                display.note(f"page {url}")
            time.sleep(_REFRESH_S)  # the main thread redraws, and takes Ctrl+C at any time
        run.wait()
    except KeyboardInterrupt as interrupt:
        began = time.monotonic()
        again = "a second SIGTERM kills" if isinstance(interrupt, Terminated) else "Ctrl+C again to kill"
        with contextlib.suppress(KeyboardInterrupt):  # a second signal, before stop() handles signals itself
            display.note(f"stopping ({again}) …")
            run.stop()
        run.stop()
        return Ending.interrupted(run, interrupt, time.monotonic() - began, _failure_of(run))
    except NodeError as error:
        return Ending.failed(error)
    except (LpPipeError, ValueError) as error:  # an elastic run lacks hosts or resources to continue
        raise NotLaunched(str(error)) from error
    finally:
        run.stop()
        display.status(run.status())
    return Ending.done(run, time.monotonic() - began)


def _failure_of(run: Run | ElasticRun) -> NodeError | None:
    """Return the failure of a run that is over, if it failed before it was stopped."""
    try:
        run.wait()
    except NodeError as error:
        return error
    except (LpPipeError, ValueError):  # an elastic run that lacks hosts or resources to continue
        return None
    return None


@contextlib.contextmanager
def _ignore_lost_output() -> Iterator[None]:
    """Ignore that the end cannot be printed (`| head`, a closed terminal, a full disk): the exit status tells it."""
    try:
        yield
    except OSError:
        drop_unwritten()


def _make_display(is_json: bool) -> Display:
    if is_json:
        return JsonDisplay()
    can_redraw = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return LiveDisplay() if can_redraw else PlainDisplay()


@contextlib.contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl+C does, also before and after the run; during the run it handles both itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def _mode(text: str) -> str:
    if text not in MODES:
        raise UsageError(f"unknown mode {text!r}{nearest(text, MODES)} (modes: {', '.join(MODES)})")
    return text


def _folder(text: str) -> Path:
    if not text:  # --run-dir=$UNSET
        raise UsageError("--run-dir is empty: for the current folder write --run-dir=.")
    return Path(text)


def _grace(text: str) -> float:
    seconds = _seconds(text)
    if seconds is None:
        raise UsageError(f"--grace={text}: give a number of seconds, such as --grace=5")
    return seconds


def _hang_limit(text: str) -> float | None:
    if text == "never":
        return None
    seconds = _seconds(text)
    if not seconds:
        raise UsageError(f"--hang-after={text}: give a number of seconds above 0, such as --hang-after=60, or never")
    return seconds


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
