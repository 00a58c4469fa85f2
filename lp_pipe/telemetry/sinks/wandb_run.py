"""Metrics as those of a run of Weights & Biases."""

from typing import Any

from lp_pipe.telemetry.sink_threads import MetricsRecord, RunSink, SinkRun


class WandbSink(RunSink):
    """Logs each record with the step of its node: nodes need not be at the same step.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, project: str, mode: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("lp.sinks.wandb needs Weights & Biases: pip install wandb") from error
        self._wandb: Any = wandb
        self._project = project
        self._mode = mode
        self._run: Any = None
        self._nodes: set[str] = set()

    def begin(self, run: SinkRun) -> None:
        self._run = self._wandb.init(
            project=self._project,
            name=run.folder.path.name,
            dir=str(run.folder.path),
            config={"command": " ".join(run.argv), **run.hyperparameters()},
            mode=self._mode or None,
            reinit="create_new",
        )
        self._nodes.clear()

    def __call__(self, record: MetricsRecord) -> None:
        step = {}
        if record.step is not None:
            name = f"{record.node}/step"
            if record.node not in self._nodes:
                self._nodes.add(record.node)
                self._run.define_metric(f"{record.node}/*", step_metric=name)
            step = {name: record.step}
        self._run.log({**step, **{f"{record.node}/{name}": value for name, value in record.values.items()}})

    def close(self) -> None:
        self._run.finish()
        self._run = None

    def __repr__(self) -> str:
        return f"lp.sinks.wandb({self._project!r})"
