"""What a run shows of its pipeline while it trains: how busy the stages are, and how a step should run."""

import contextlib
import time
from collections.abc import Iterable, Sequence

from lp_pipe.context import context, log_metrics
from lp_pipe.errors import Unavailable
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.protocol import Report
from lp_pipe.pipeline.schedule.ir import Action
from lp_pipe.pipeline.schedule.prediction import EVENT, Prediction, measured_costs, planned_costs

_LOG_EVERY_S = 1.0


class UtilizationLog:
    """Logs about once a second which share of the pipeline's time each worker computed, and the bubble between.

    The metrics are `utilization/I`, of the stage worker with the label and index `stages/I`, and `bubble_fraction`.
    Each is that of all steps since the last record, as StepResult defines it. The last record comes with the node's
    end, so a short run has one as well.

    The prediction of a step is logged once, as an event: with the seconds of the plan, or of the step before the first
    record.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._logged_at = time.monotonic()
        self._busy_s: list[float] = []  # since the last record, by rank
        self._pipe_s = 0.0
        self._step = 0
        self._spans: Sequence[Sequence[tuple[str, float, float]]] = ()  # of the last step, by rank
        self._has_predicted = any(config.predicted_seconds)  # a plan that a person has written has zeros
        if self._has_predicted:
            _log_prediction(_by_the_plan(config))

    def note(self, step: int, reports: Sequence[Report], pipe_s: float) -> None:
        """Take note of a finished step. pipe_s: the time from its start on the workers to its last action."""
        before = self._busy_s or [0.0] * len(reports)
        self._busy_s = [busy_s + report.busy_s for busy_s, report in zip(before, reports, strict=True)]
        self._pipe_s += pipe_s
        self._step = step
        self._spans = [report.spans for report in reports]
        if time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._log()

    def close(self) -> None:
        """Log the steps since the last record, unless the launcher is gone."""
        with contextlib.suppress(Unavailable):
            self._log()

    def _log(self) -> None:
        busy_s, pipe_s = self._busy_s, self._pipe_s
        self._logged_at, self._busy_s, self._pipe_s = time.monotonic(), [], 0.0
        if pipe_s:
            shares = [seconds / pipe_s for seconds in busy_s]
            by_worker = {f"utilization/{rank}": share for rank, share in enumerate(shares)}
            log_metrics({"bubble_fraction": 1.0 - sum(shares) / len(shares), **by_worker}, self._step)
            if not self._has_predicted:
                self._has_predicted = True
                _log_prediction(_by_a_step(self._config, self._step, self._spans))


def _log_prediction(prediction: Prediction) -> None:
    facts = prediction.facts()
    if facts is not None:
        context().services.log_event(EVENT, **facts)


def _by_the_plan(config: PipelineConfig) -> Prediction:
    chunks = len(config.placement) // config.workers
    seconds = [config.predicted_seconds[worker] / (chunks * config.replicas[worker]) for worker in config.placement]
    return Prediction(config.schedule_for(config.microbatches), planned_costs(seconds), "by the plan's seconds")


def _by_a_step(config: PipelineConfig, step: int, spans: Iterable[Iterable[tuple[str, float, float]]]) -> Prediction:
    replicas = [config.replicas[worker] for worker in config.placement]  # they share a stage's micro-batches
    found = ((Action.parse(name), end - start) for by_rank in spans for name, start, end in by_rank)
    seconds = ((action.op, action.stage, took / replicas[action.stage]) for action, took in found if action)
    costs = measured_costs(seconds, len(replicas))
    return Prediction(config.schedule_for(config.microbatches), costs, f"by the seconds of step {step}")
