"""The end of a run, as text and as an exit status."""

from dataclasses import dataclass

from lp_pipe.cli.errors import DONE, NODE_FAILED, counted, status_of
from lp_pipe.errors import NodeError
from lp_pipe.launch import ElasticRun, Run
from lp_pipe.launch.report import closing_lines, run_folder
from lp_pipe.telemetry.run_folder import RunFolder


@dataclass(frozen=True)
class Ending:
    """The end of a run.

    kind: "done", "failed" or "interrupted". text: ends with the run's folder and the command that resumes it.
    """

    kind: str
    exit_status: int
    text: str
    failure: NodeError | None = None


def done(run: Run | ElasticRun, seconds: float) -> Ending:
    return Ending("done", DONE, f"done in {seconds:.1f} s; {run_folder(RunFolder(run.run_dir))}")


def failed(error: NodeError) -> Ending:
    return Ending("failed", NODE_FAILED, error.report, error)


def interrupted(
    run: Run | ElasticRun, interrupt: KeyboardInterrupt, seconds: float, failure: NodeError | None = None
) -> Ending:
    """Return the end of an interrupted run.

    seconds: from the signal to the end of the last node. failure: the failure that came before the signal, if any.
    """
    nodes = counted(sum(len(rows) for rows in run.status().values()), "node")
    end = closing_lines(RunFolder(run.run_dir))
    text = f"interrupted; {nodes} stopped in {seconds:.1f} s; {end}"
    if failure is not None:
        text = f"{failure.report.removesuffix(end)}{text}"
    return Ending("interrupted", status_of(interrupt), text, failure)
