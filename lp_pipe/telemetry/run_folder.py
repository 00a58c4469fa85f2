"""The names of all files in a run's folder.

    run.json            how the run was launched, and how it ended (launch/run_records.py)
    graph.json          the program's graph, as `lp_pipe graph -o graph.json` writes it; graph.svg: its picture
    events.jsonl        what happened to the nodes, one JSON object a line (telemetry/events.py)
    metrics.jsonl       what nodes logged (telemetry/metrics.py)
    metrics.index       what the web page has read of it, if it is large (dashboard/index_file.py)
    trace.json          what all nodes did, for ui.perfetto.dev (launch/trace_file.py)
    tensorboard/        event files of `lp.sinks.tensorboard()`, a folder for each node
    failure.txt         every failure with its full traceback
    hangs.log           reports of waits that took long
    logs/               what each node printed; logs.json: the nodes of files that are not named after them
    debuggers/          which nodes wait in a debugger (launch/processes/node_stdin.py)
    agents/             what the agents of a multi-host run printed
    agents.secret       what agents that the user starts need to join (launch/engines/manual.py)
    checkpoints/        what Checkpoints saved

Nodes write files of their own beside these.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from lp_pipe.telemetry.file_names import node_of_log


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Its files need not exist."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def graph(self) -> Path:
        return self.path / "graph.json"

    @property
    def picture(self) -> Path:
        return self.path / "graph.svg"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def metrics_index(self) -> Path:
        return self.path / "metrics.index"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def failures(self) -> Path:
        return self.path / "failure.txt"

    @property
    def debuggers(self) -> Path:
        return self.path / "debuggers"

    @property
    def hangs(self) -> Path:
        return self.path / "hangs.log"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def log_index(self) -> Path:
        return self.path / "logs.json"

    @property
    def agents(self) -> Path:
        return self.path / "agents"

    @property
    def agents_secret(self) -> Path:
        return self.path / "agents.secret"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_names(self) -> set[str]:
        """Return the names of the checkpoints in the usual place, from which `--resume` can start."""
        return {path.name for path in self.checkpoints.glob("step-*")}

    def results(self) -> list[Path]:
        """Return the files that nodes made: metrics, checkpoints, and their own files.

        Raises:
            OSError: the folder cannot be read.
        """
        of_the_launcher = (
            *(self.record, self.graph, self.picture, self.events, self.failures, self.hangs, self.logs, self.trace),
            *(self.log_index, self.debuggers, self.agents, self.metrics_index),
        )
        return [path for path in self.path.iterdir() if path not in of_the_launcher]

    def saved_names(self) -> list[str]:
        """Return the names of checkpoint folders and of the metrics, of those that there are."""
        return sorted(path.name for path in self.path.glob("*") if path == self.metrics or path.match("checkpoint*"))

    def node_logs(self) -> dict[str, Path]:
        """Return the log file of every node that has printed something, by node_id."""
        names = self.node_ids_of_logs()
        return {names.get(path.name) or node_of_log(path.name): path for path in self.logs.glob("*-*.log")}

    def node_ids_of_logs(self) -> dict[str, str]:
        """Return, by file name, the node_id of each log file that is not named after its node."""
        try:
            found = json.loads(self.log_index.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
