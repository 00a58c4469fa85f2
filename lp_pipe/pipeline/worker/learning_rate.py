"""A worker's part in what its pipeline's user asks of learning rates, between two steps."""

from lp_pipe.pipeline.worker.restart_check import RestartCheck
from lp_pipe.pipeline.worker.training import Training


class LearningRate:
    """Of one worker. Its public methods are also the worker's, for the conductor."""

    def __init__(self, training: Training, restart_check: RestartCheck) -> None:
        self._restart_check = restart_check
        self._training = training

    def scheduler_kind(self) -> tuple[str, bool] | None:
        """Its class, and whether it waits for a metric; None: there is none here."""
        kind = self._training.scheduler_kind()
        return (kind, self._training.waits_for_metric) if kind is not None else None

    def step_scheduler(self, metric: float) -> None:
        """Of stages with nothing to train, nothing.

        Raises:
            Exception: the scheduler's own; other workers' may have made the step.
            Unavailable: this process was started again; no channel would tell.
        """
        self._restart_check.check_joined()
        self._restart_check.note_change()
        self._training.step_scheduler_by(metric)

    def learning_rates(self) -> dict[str, float]:
        """By the names of this worker's parameters.

        Raises:
            Unavailable: this process was started again, with the initial ones.
        """
        self._restart_check.check_joined()
        return self._training.learning_rates()
