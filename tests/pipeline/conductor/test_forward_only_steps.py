"""A pipeline with the schedule "forward" evaluates; it takes no steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import PlainLoop, launched, model_with_everything, random_batches

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([6, 1, 7])


@pytest.mark.parametrize("options", [{"stages": 3}, {"chunks": 2}, {"replicas": (2, 1)}], ids=str)
def test_a_pipeline_for_inference_has_the_models_outputs(options: dict[str, Any]) -> None:
    """ "forward" is one of `pp.schedules()`, and add_pipeline refused it."""
    model = model_with_everything()
    plain = PlainLoop(model, 4)
    with launched("thread", model, schedule="forward", microbatches=4, **options) as pipeline:
        outputs = list(pipeline.forward_stream(value for value, _ in BATCHES))
        assert all(map(torch.equal, outputs, [plain.output(value) for value, _ in BATCHES]))
        assert pipeline.evaluate([BATCHES[0]]).loss == plain.evaluate(BATCHES[0])


@pytest.mark.parametrize(
    "operation",
    [
        lambda pipeline: pipeline.step(BATCHES[0]),
        lambda pipeline: list(pipeline.steps(1)),
        lambda pipeline: pipeline.trace(1),
        lambda pipeline: pipeline.profile_memory(),
    ],
    ids=["step", "steps", "trace", "profile_memory"],
)
def test_steps_are_refused_and_the_pipeline_goes_on(operation: Callable[[pp.PipelineClient], Any]) -> None:
    with launched("thread", model_with_everything(), BATCHES, stages=2, schedule="forward") as pipeline:
        before = pipeline.fingerprint()
        with pytest.raises(pp.ScheduleError, match=r"'forward'.*schedule='1f1b'"):
            operation(pipeline)
        assert pipeline.fingerprint() == before
