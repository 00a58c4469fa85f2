"""How a run ended: in words, and as an exit status."""

import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from lp_pipe.cli.errors import DONE, INTERRUPTED, NODE_FAILED, counted
from lp_pipe.cli.paths import shown
from lp_pipe.errors import NodeError
from lp_pipe.launch import Run
from lp_pipe.launch.report import failure_report

_WORTH_NAMING = ("checkpoint*", "metrics.jsonl")


@dataclass(frozen=True)
class Ending:
    """kind: "done", "failed" or "interrupted"; the last line of `text` says where the run's folder is."""

    kind: str
    exit_status: int
    text: str
    failure: NodeError | None = None


def done(run: Run, seconds: float) -> Ending:
    return Ending("done", DONE, f"done in {seconds:.1f} s; {_folder(run)}")


def failed(run: Run, error: NodeError) -> Ending:
    log_path = run.log_path(error.label, error.index)
    report = failure_report(
        error,
        host=socket.gethostname(),
        later_failures=run.later_failures,
        last_lines=run.last_lines(error.label, error.index),
        log_path=shown(log_path) if log_path is not None and log_path.exists() else None,
        folder=Path.cwd(),
    )
    return Ending("failed", NODE_FAILED, f"{report}\n{_folder(run)}", error)


def interrupted(run: Run, seconds: float) -> Ending:
    """seconds: from the signal to the end of the last node."""
    number = run.interrupted_by or signal.SIGINT
    nodes = counted(sum(len(rows) for rows in run.status().values()), "node")
    text = f"interrupted; {nodes} stopped in {seconds:.1f} s; {_folder(run)}"
    return Ending("interrupted", INTERRUPTED + number, text)


def _folder(run: Run) -> str:
    """The run's folder, and what was saved in it."""
    saved = sorted(path.name for pattern in _WORTH_NAMING for path in run.run_dir.glob(pattern))
    contents = f" (with {', '.join(saved)})" if saved else ""
    return f"run folder {shown(run.run_dir)}{contents}"
