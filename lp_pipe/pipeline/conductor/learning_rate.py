"""The learning rates of the whole model, and a scheduler that waits for its user's metric, on all workers."""

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.protocol import GetLearningRates, GetSchedulerKind, StepScheduler


class LearningRate:
    """Called by one thread, between operations."""

    def __init__(self, config: PipelineConfig, workers: Workers) -> None:
        self._config = config
        self._workers = workers

    def by_name(self) -> dict[str, float]:
        """Of all parameters that the next step would change, in the order of state_dict."""
        return self._config.names.whole(self._workers.some(self._config.ranks.firsts, GetLearningRates()))

    def step(self, metric: float) -> None:
        """Step every worker's scheduler that waits for a metric."""
        self._workers.all(StepScheduler(metric))

    def refuse_without_metric(self) -> None:
        """
        Raises:
            PipelineError: no worker has such a scheduler; says what it has, and what to do.
        """
        if self._config.lr_scheduler is None:
            raise PipelineError(
                "scheduler_step(): the model has no lr_scheduler: give it one whose step() takes a metric, such as "
                "lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau"
            )
        found = [kind for kind in self._workers.all(GetSchedulerKind()) if kind is not None]
        if not any(kind.waits_for_metric for kind in found):
            kinds = ", ".join(sorted({kind.name for kind in found})) or "with nothing to train, none"
            raise PipelineError(
                f"scheduler_step(): the model's scheduler ({kinds}) needs no metric, so that every training step steps "
                "it: leave the call out, or give one whose step() takes a metric, such as ReduceLROnPlateau"
            )
