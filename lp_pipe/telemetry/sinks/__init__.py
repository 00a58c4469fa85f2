"""Sinks of metrics, for `launch(metrics_sinks=[…])`: TensorBoard's files, MLflow, Weights & Biases.

A sink is any function of a MetricsRecord (`.time .node .step .values`).
"""

from collections.abc import Callable

from lp_pipe.telemetry.sink_threads import MetricsRecord as MetricsRecord
from lp_pipe.telemetry.sink_threads import RunSink as RunSink
from lp_pipe.telemetry.sink_threads import SinkRun as SinkRun


def tensorboard() -> RunSink:
    """Return a sink that writes TensorBoard's event files, which `tensorboard --logdir RUN/tensorboard` shows.

    There is a folder for each node. A tag is the name of a metric. Needs no package; TensorBoard reads the files.
    """
    from lp_pipe.telemetry.sinks.tensorboard_files import TensorBoardSink

    return TensorBoardSink()


def mlflow(uri: str, experiment: str = "") -> RunSink:
    """Return a sink that logs to an MLflow tracking server or folder: one MLflow run, with metrics "label/index/name".

    experiment: its name there; default: the program's name.

    Raises:
        ImportError: neither mlflow nor mlflow-skinny is installed.
    """
    from lp_pipe.telemetry.sinks.mlflow_run import MlflowSink

    return MlflowSink(uri, experiment)


def wandb(project: str, mode: str = "") -> RunSink:
    """Return a sink that logs to Weights & Biases: one run, with metrics "label/index/name".

    mode: "online", "offline" or "disabled", as of `wandb.init`; default: what WANDB_MODE says.

    Raises:
        ImportError: wandb is not installed.
    """
    from lp_pipe.telemetry.sinks.wandb_run import WandbSink

    return WandbSink(project, mode)


# By the name that `lp_pipe launch --sink=NAME[:ARGUMENT]` takes.
SINKS: dict[str, Callable[..., RunSink]] = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
