"""Metrics as those of an MLflow run."""

import re
from typing import Any

from lp_pipe.telemetry.sink_threads import MetricsRecord, RunSink, SinkRun

_NOT_IN_A_KEY = re.compile(r"[^\w\-. /]")  # other characters make MLflow refuse the whole record
_MOST_KEY_CHARS = 250
_MOST_PARAMETER_CHARS = 500


class MlflowSink(RunSink):
    """Logs each record by one request. A run in the folder of an earlier one, with this sink, continues its MLflow run.

    Raises:
        ImportError: neither mlflow nor mlflow-skinny is installed.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        try:
            import mlflow
            import mlflow.entities
            import mlflow.tracking
        except ImportError as error:
            raise ImportError("lp.sinks.mlflow needs MLflow: pip install mlflow-skinny") from error
        self._mlflow: Any = mlflow
        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._run_ids: dict[str, str] = {}  # by the run's folder
        self._run_id = ""

    def begin(self, run: SinkRun) -> None:
        self._client = self._mlflow.tracking.MlflowClient(tracking_uri=self._uri)
        folder = str(run.folder.path)
        if folder not in self._run_ids:
            self._run_ids[folder] = self._new_run(run)
        self._run_id = self._run_ids[folder]

    def __call__(self, record: MetricsRecord) -> None:
        when, step = int(record.time * 1000), record.step or 0
        metrics = [
            self._mlflow.entities.Metric(_key(f"{record.node}/{name}"), value, when, step)
            for name, value in record.values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
        self._client = None

    def _new_run(self, run: SinkRun) -> str:
        name = self._experiment or run.program
        found = self._client.get_experiment_by_name(name)
        experiment_id = found.experiment_id if found is not None else self._client.create_experiment(name)
        tags = {"lp_pipe.run_dir": str(run.folder.path), "lp_pipe.command": " ".join(run.argv)}
        run_id: str = self._client.create_run(experiment_id, run_name=run.folder.path.name, tags=tags).info.run_id
        for key, value in run.hyperparameters().items():
            self._client.log_param(run_id, _key(key), value[:_MOST_PARAMETER_CHARS])
        return run_id

    def __repr__(self) -> str:
        return f"lp.sinks.mlflow({self._uri!r})"


def _key(name: str) -> str:
    return _NOT_IN_A_KEY.sub("_", name)[:_MOST_KEY_CHARS]
