"""Rules against misuse watch the first step, the first one after a change of modules, or all with checks="always"."""

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.worker.rules import RULES
from tests.pipeline.plain_loop import D, launched, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([8, 8])


def _updates_itself_from_step_1_on() -> nn.Module:
    layer, calls = nn.Linear(D, D), []

    def update(parameter: Tensor) -> None:
        calls.append(parameter)
        if len(calls) > 2:  # the micro-batches of step 0
            with torch.no_grad():
                parameter.mul_(0.5)

    layer.weight.register_post_accumulate_grad_hook(update)
    return layer


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_misuse_that_begins_after_the_first_step_is_found_by_always(schedule: str) -> None:
    model = pp.Model([pp.Layer(_updates_itself_from_step_1_on), nn.Linear(D, D)], squared_error, sgd)
    options = {"stages": [1], "microbatches": 2, "schedule": schedule}
    with launched("thread", model, BATCHES, **options) as pipeline:
        assert len(list(pipeline.steps())) == 2
    with launched("thread", model, BATCHES, checks="always", **options) as pipeline:
        pipeline.step()
        with pytest.raises(pp.PipelineError, match="changes parameter 'weight' of Linear"):
            pipeline.step()


def _freeze(modules: dict[str, nn.Module]) -> None:
    for module in modules.values():
        module.requires_grad_(False)


def test_the_step_after_a_change_of_modules_counts_as_the_first() -> None:
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, sgd)
    with launched("thread", model, BATCHES, stages=2, microbatches=2) as pipeline:
        pipeline.step()
        pipeline.apply(_freeze)
        with pytest.raises(pp.PipelineError, match=r"the loss has no gradient, .* all parameters are frozen"):
            pipeline.step()


def test_an_unknown_time_of_checks_is_refused() -> None:
    model = pp.Model([nn.Linear(D, D)], squared_error, sgd)
    with pytest.raises(pp.PipelineError, match=r"checks='never'.*first_step.*always"):
        pp.add_pipeline(lp.Program("rules"), model, stages=1, checks="never")


def test_the_table_names_each_rule_once() -> None:
    assert len({rule.refuses for rule in RULES}) == len({rule.check for rule in RULES}) == len(RULES)
