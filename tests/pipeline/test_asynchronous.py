"""Asynchronous 1F1B: stages use weights exactly as old as the papers say, with the bits of one process."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.delayed_gradients import DelayedLoop, Rule, buffered, stashed, synced
from tests.pipeline.plain_loop import (
    D,
    assert_same_state,
    launched,
    launched_many,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

# 10 in 4 makes slices of 3, 3, 3 and 1; 3 in 4 makes three; 2 in 4 has fewer micro-batches than stages.
BATCHES = random_batches([10, 3, 2, 12, 8])
CUTS = [3, 5, 7]


def layers() -> list[nn.Module]:
    return [nn.Linear(D, D), nn.Tanh(), nn.Dropout(0.2), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)]


def simulated(loop: DelayedLoop, batches: Sequence[Any] = BATCHES) -> tuple[list[float], dict[str, Tensor]]:
    return [loop.step(batch) for batch in batches], loop.state_dict()


@pytest.mark.parametrize(
    ("schedule", "rules"),
    [
        ("pipedream", stashed(4)),
        (pp.vertical_sync(pp.make_schedule("pipedream", 4, 4)), synced(4)),
        ("pipedream_2bw", buffered(4)),
    ],
    ids=["stashed", "vertical sync", "2bw"],
)
def test_a_full_pipeline_trains_as_one_process_with_delayed_gradients(schedule: Any, rules: list[Rule]) -> None:
    model = model_with_everything(loss=squared_error)
    with launched("thread", model, BATCHES, stages=CUTS, schedule=schedule, microbatches=4) as pipeline:
        losses = [result.loss for result in pipeline.steps()]
        trained = pipeline.state_dict()
    expected, weights = simulated(DelayedLoop(model, CUTS, 4, rules))
    assert losses == expected
    assert_same_state(trained, weights)


@pytest.mark.slow
def test_stages_in_processes_train_the_same() -> None:
    model = pp.Model(layers(), squared_error, sgd)
    pipelines = [
        (model, BATCHES, {"stages": [2, 4], "schedule": name, "microbatches": 4})
        for name in ("pipedream", "pipedream_2bw")
    ]
    with launched_many("process", pipelines) as clients:
        trained = [([result.loss for result in client.steps()], client.state_dict()) for client in clients]
    loops = DelayedLoop(model, [2, 4], 4, stashed(3)), DelayedLoop(model, [2, 4], 4, buffered(3))
    for (losses, state), loop in zip(trained, loops, strict=True):
        expected, weights = simulated(loop)
        assert losses == expected
        assert_same_state(state, weights)


@pytest.mark.parametrize(
    ("schedule", "replicas", "rules"),
    [
        ("pipedream", [2, 2, 2], [Rule(2, 2, 2), Rule(2, 1, 2), Rule(2, 0, 2)]),
        ("pipedream", [3, 1, 2], [Rule(3, 1, 3), Rule(1, 2, 1), Rule(2, 0, 2)]),
        ("pipedream", [1, 3, 1], [Rule(1, 4, 1), Rule(3, 1, 3), Rule(1, 0, 1)]),
        ("pipedream_2bw", [2, 2, 2], [Rule(6, 1, 2)] * 3),
        ("pipedream_2bw", [1, 2, 1], [Rule(4, 1, 1), Rule(4, 1, 2), Rule(4, 1, 1)]),
    ],
)
def test_replicas_of_a_stage_update_together_after_each_round(
    schedule: str, replicas: list[int], rules: list[Rule]
) -> None:
    """Backwards go to the replica of their forward. Of several micro-batches per update the mean counts."""
    model = pp.Model(layers(), squared_error, sgd)
    batches = random_batches([16, 8, 14, 3])
    options = {"stages": [2, 4], "replicas": replicas, "schedule": schedule, "microbatches": 8}
    with launched("thread", model, batches, **options) as pipeline:
        losses = [result.loss for result in pipeline.steps()]
        trained = pipeline.state_dict()
    expected, weights = simulated(DelayedLoop(model, [2, 4], 8, rules), batches)
    assert losses == pytest.approx(expected, rel=1e-12), "replicas add up their parts of the loss"
    assert_same_state(trained, weights)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_results_do_not_depend_on_whether_the_pipeline_runs_empty_between_steps(schedule: str) -> None:
    """Train one step at a time, full, with evaluations between, and with own batches: all have the same bits."""
    model = model_with_everything(loss=squared_error)
    options = {"stages": CUTS, "schedule": schedule, "microbatches": 4}
    with launched_many("thread", [(model, BATCHES, options)] * 4) as (alone, full, evaluated, given):
        one_by_one = [alone.step() for _ in BATCHES]
        in_a_row = list(full.steps(len(BATCHES)))
        with_evaluations = [(result, evaluated.evaluate(BATCHES[:2])) for result in evaluated.steps()]
        own = [given.step(batch) for batch in BATCHES]
        losses = [[result.loss for result in results] for results in (one_by_one, in_a_row, own)]
        losses.append([result.loss for result, _ in with_evaluations])
        fingerprints = {client.fingerprint() for client in (alone, full, evaluated, given)}
    assert all(row == losses[0] for row in losses)
    assert len(fingerprints) == 1


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_a_step_reports_the_mean_of_its_micro_batches_also_where_losses_are_sums(schedule: str) -> None:
    """Regression: the result was the sum, which is that of no update. Metrics are means, too."""

    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, float]]:
        return (output - target).square().sum(), {"samples": len(target)}

    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], summed, lambda ps: torch.optim.SGD(ps, 0.0), loss_weight="one")
    with launched("thread", model, stages=2, schedule=schedule, microbatches=4) as pipeline:
        x, y = BATCHES[4]
        result, mean = pipeline.step((x, y)), pipeline.evaluate(list(zip(x.chunk(4), y.chunk(4), strict=True)))
    assert (result.loss, result.metrics) == (pytest.approx(mean.loss), {"samples": 2.0})


def test_every_action_uses_the_version_that_the_paper_says() -> None:
    """PipeDream, section 3.3: stage s of p forwards with weights p - 1 - s updates old, and backwards with the same."""
    batches = random_batches([8, 8, 8])
    model = pp.Model(layers(), squared_error, sgd)
    schedules = ["pipedream", pp.vertical_sync(pp.make_schedule("pipedream", 3, 4)), "pipedream_2bw"]
    pipelines = [(model, batches, {"stages": [2, 4], "schedule": s, "microbatches": 4}) for s in schedules]
    with launched_many("thread", pipelines) as clients:
        stash, sync, double = (client.trace(3) for client in clients)

    def versions(traces: list[pp.StepTrace], stage: int, op: str) -> list[int]:
        return [version for step in traces for action, version in step.versions[stage] if f"{stage}{op}" in action]

    for op in "FB":
        for stage in range(3):
            assert versions(stash, stage, op) == [max(0, j - (2 - stage)) for j in range(12)]
            assert versions(sync, stage, op) == [max(0, j - 2) for j in range(12)]
            # An update after every three micro-batches of a step's four, and after the last one.
            assert versions(double, stage, op) == [0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 4]


def test_every_replica_uses_the_version_of_its_round_and_takes_the_backwards_of_its_forwards() -> None:
    """PipeDream, section 3.3: 1F1B-RR. Here stages update after 1, 3 and 1 micro-batches, 4, 1 and 0 updates late."""
    model = pp.Model(layers(), squared_error, sgd)
    options = {"stages": [2, 4], "replicas": [1, 3, 1], "schedule": "pipedream", "microbatches": 6}
    with launched("thread", model, random_batches([12, 12, 12]), **options) as pipeline:
        traces = pipeline.trace(3)
    places = [(0, 0, 1, 1, 4), (1, 0, 3, 3, 1), (1, 1, 3, 3, 1), (1, 2, 3, 3, 1), (2, 0, 1, 1, 0)]
    for rank, (stage, replica, replicas, every, delay) in enumerate(places):
        own = range(replica, 6, replicas)
        for step, trace in enumerate(traces):
            late = {j: max(0, (6 * step + j) // every - delay) for j in own}
            wanted = {f"{stage}{op}{j}": version for op in "FB" for j, version in late.items()}
            assert dict(trace.versions[rank]) == wanted


def _clip(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


class _Halved(nn.Module):
    """A Linear whose weight has hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.linear.weight.register_hook(lambda gradient: gradient * 0.5)
        self.linear.weight.register_post_accumulate_grad_hook(_clip)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made


def test_older_weights_have_the_hooks_of_their_parameter(tmp_path: Path) -> None:
    # Hooks were left out without a word, so that a gradient that they clip was not clipped.
    model = pp.Model(lambda: [_Halved(), nn.Tanh(), _Halved(), nn.Tanh()], squared_error, sgd)
    with launched("thread", model, BATCHES, stages=2, schedule="pipedream", microbatches=4) as pipeline:
        for result in pipeline.steps():
            if result.step == 1:
                pipeline.save(tmp_path)
        trained = pipeline.state_dict()
        pipeline.load(tmp_path)
        list(pipeline.steps())
        assert_same_state(pipeline.state_dict(), trained)
    _, weights = simulated(DelayedLoop(model, [2], 4, stashed(2)))
    assert_same_state(trained, weights)


def test_epochs_are_evaluated_and_saved_while_the_pipeline_is_full(tmp_path: Path) -> None:
    """Three batches an epoch, the last of them smaller; the learning rate falls every two steps, in the loop as here.

    What is evaluated are the weights after `current_step()` steps, of all stages.
    """
    *batches, test = random_batches([8, 8, 5] * 3 + [6])
    model = model_with_everything(loss=squared_error)
    options = {"stages": CUTS, "schedule": "pipedream", "microbatches": 4}
    seen: dict[int, float] = {}
    with launched_many("thread", [(model, batches, options)] * 2) as (pipeline, resumed):
        for result in pipeline.steps():
            if result.step % 3 == 2:
                seen[pipeline.current_step()] = pipeline.evaluate([test]).loss
                if result.step == 2:
                    pipeline.save(tmp_path)
        resumed.load(tmp_path)
        list(resumed.steps())
        assert resumed.fingerprint() == pipeline.fingerprint()
        assert resumed.evaluate([test]).loss == seen[9]
    loop, expected = DelayedLoop(model, CUTS, 4, stashed(4)), {}
    for step, batch in enumerate(batches, start=1):
        loop.step(batch)
        expected[step] = loop.evaluate(test)
    assert seen == {step: expected[step] for step in (4, 7, 9)}


def test_the_pipeline_stays_full_between_steps() -> None:
    """A stage forwards the next step's first micro-batches before this step's last backward."""
    model = pp.Model(layers(), squared_error, sgd)
    options = {"stages": [2, 4], "schedule": "pipedream", "microbatches": 4}
    with launched("thread", model, random_batches([8, 8, 8]), **options) as pipeline:
        first, second, _ = pipeline.trace(3)
    ends = {action: end for action, _, end in first.workers[0]}
    begins = {action: start for action, start, _ in second.workers[0]}
    assert begins["0F1"] < ends["0B3"]
    assert begins["0F2"] > ends["0B3"]


def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Saved while the pipeline is full: older weights that forwards will still use are in the checkpoint."""
    model = model_with_everything(loss=squared_error)
    options = {"stages": CUTS, "schedule": "pipedream", "microbatches": 4}
    with launched_many("thread", [(model, BATCHES, options)] * 2) as (whole, resumed):
        for result in whole.steps():
            if result.step == 1:
                whole.save(tmp_path)
                saved_at = whole.current_step()
        resumed.load(tmp_path)
        assert resumed.current_step() == saved_at == 3  # one step is ahead of the results
        list(resumed.steps())
        assert resumed.current_step() == len(BATCHES)
        assert resumed.fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_stages_that_update_at_different_times_go_on_from_a_checkpoint(
    replicas: tuple[int, ...], tmp_path: Path
) -> None:
    # Each took the largest number of updates of all stages for its own, and its older weights for none of its.
    model = pp.Model(layers(), squared_error, sgd)
    options = {"stages": [2, 4], "schedule": "pipedream", "microbatches": 4, "replicas": replicas}
    with launched_many("thread", [(model, BATCHES, options)] * 2) as (whole, resumed):
        whole.step()
        whole.save(tmp_path)
        resumed.load(tmp_path)
        assert [result.loss for result in resumed.steps()] == [result.loss for result in whole.steps()]
        assert resumed.fingerprint() == whole.fingerprint()


def test_another_number_of_stages_goes_on_from_the_weights_that_there_are(tmp_path: Path) -> None:
    model = model_with_everything(loss=squared_error)
    options = {"schedule": "pipedream", "microbatches": 4}
    pipelines = [(model, BATCHES, {**options, "stages": 2}), (model, BATCHES, {**options, "stages": CUTS})]
    with launched_many("thread", pipelines) as (two, four):
        two.step()
        two.save(tmp_path)
        four.load(tmp_path)
        assert_same_state(four.state_dict(), two.state_dict())
        assert [result.step for result in four.steps()] == [1, 2, 3, 4]


def test_weights_that_are_loaded_replace_all_versions() -> None:
    parts = [layer for layer in layers() if not isinstance(layer, nn.Dropout)]
    model = pp.Model(parts, squared_error, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    options = {"stages": [2, 4], "schedule": "pipedream", "microbatches": 4}
    with launched_many("thread", [(model, BATCHES, options)] * 2) as (used, fresh):
        start = fresh.state_dict()
        used.step()
        used.load_state_dict(start)
        assert used.step(BATCHES[0]).loss == fresh.step(BATCHES[0]).loss


def test_a_loop_that_is_left_early_has_done_one_step_more() -> None:
    model = pp.Model(layers(), squared_error, sgd)
    options = {"stages": [2, 4], "schedule": "pipedream", "microbatches": 4}
    with launched("thread", model, BATCHES, **options) as pipeline:
        for result in pipeline.steps():
            if result.step == 1:
                break
        assert pipeline.current_step() == 3
        assert pipeline.step().step == 2, "its result is still to be had"
        assert [result.step for result in pipeline.steps()] == [3, 4]
        with pytest.raises(pp.EndOfData):
            pipeline.step()


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_a_loop_that_was_left_is_gone_on_with_to_its_last_step(schedule: str) -> None:
    # The result that was left behind counted as one of the next loop's, which then trained one step less.
    model = pp.Model(layers(), squared_error, sgd)
    options = {"stages": [2, 4], "schedule": schedule, "microbatches": 4}
    with launched_many("thread", [(model, BATCHES, options)] * 2) as (left, whole):
        seen = [result.step for result in itertools.islice(left.steps(4), 2)]
        assert (seen, left.current_step()) == ([0, 1], 3)
        seen += [result.step for result in left.steps(4 - left.current_step())]
        assert (seen, left.current_step()) == ([0, 1, 2, 3], 4)
        list(whole.steps(4))
        assert left.fingerprint() == whole.fingerprint()


def test_a_loop_that_was_left_in_its_last_but_one_step_has_one_result_more_to_come() -> None:
    model = pp.Model(layers(), squared_error, sgd)
    options = {"stages": [2, 4], "schedule": "pipedream", "microbatches": 4}
    with launched("thread", model, BATCHES, **options) as pipeline:
        next(iter(pipeline.steps(2)))
        assert [result.step for result in pipeline.steps(2 - pipeline.current_step())] == [1]
        assert pipeline.current_step() == 2
        assert list(pipeline.steps(0)) == []


def test_a_loop_that_is_left_early_goes_on_to_as_many_steps_as_it_says() -> None:
    # The result that was still to be had counted as a step: the training ended one short.
    model = pp.Model(layers(), squared_error, sgd)
    with launched("thread", model, BATCHES, stages=[2, 4], schedule="pipedream", microbatches=4) as pipeline:
        next(pipeline.steps())
        steps = [result.step for result in pipeline.steps(4 - pipeline.current_step())]
        assert (steps, pipeline.current_step()) == ([1, 2, 3], 4)


@pytest.mark.parametrize("how", ["save", "save_async", "mirror"])
def test_a_checkpoint_in_the_middle_of_a_loop_has_the_result_that_is_due(how: str, tmp_path: Path) -> None:
    # It was lost, and with it whatever the loop would have done with it.
    model = pp.Model(layers(), squared_error, sgd)
    with launched("thread", model, BATCHES, stages=[2, 4], schedule="pipedream", microbatches=4) as pipeline:

        def keep() -> None:
            if how == "mirror":
                pipeline.mirror()
            elif how == "save":
                pipeline.save(tmp_path)
            else:
                pipeline.save_async(tmp_path).result(30.0)

        def go_back() -> None:
            if how == "mirror":
                pipeline.go_back(3)
            else:
                pipeline.load(tmp_path)

        losses = []
        for result in pipeline.steps():
            losses.append(result.loss)
            if result.step == 1:
                keep()
        go_back()
        assert [result.loss for result in pipeline.steps(5 - pipeline.current_step())] == losses[2:]
        go_back()
        assert pipeline.step().step == 3, "who asks for a step wants one that is done now"


class _FailsLate(nn.Module):
    """Raises in its 6th forward, which is of the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 6:
            raise ArithmeticError("too late")
        return value


@pytest.mark.parametrize("index", [0, 3, 6])
def test_a_step_that_fails_is_named_and_a_checkpoint_makes_the_pipeline_whole_again(index: int, tmp_path: Path) -> None:
    parts = layers()
    parts.insert(index, _FailsLate())
    model = pp.Model(parts, squared_error, sgd)
    options = {"stages": [2, 4], "schedule": "pipedream", "microbatches": 4}
    with launched("thread", model, random_batches([8] * 4), **options) as pipeline:
        pipeline.save(tmp_path)
        with pytest.raises(ArithmeticError, match="too late"):
            list(pipeline.steps())
        with pytest.raises(pp.PipelineError, match="load\\(\\) a checkpoint"):
            pipeline.step()
        pipeline.load(tmp_path)
        assert [result.step for result in pipeline.steps()] == [0, 1, 2, 3]


class _RefusesInfinity(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        if not torch.isfinite(value).all():
            raise RuntimeError("infinity")
        return value


def test_a_forward_that_fails_ahead_of_its_step_leaves_nobody_waiting() -> None:
    # The other stages waited for messages of a step that was only promised, and nobody told them.
    batches = random_batches([8] * 5)
    batches[3] = (batches[3][0] * float("inf"), batches[3][1])
    model = pp.Model([_RefusesInfinity(), *layers()], squared_error, sgd)
    with launched("thread", model, batches, stages=[3, 5], schedule="pipedream", microbatches=4) as pipeline:
        steps = pipeline.steps()
        assert [next(steps).step, next(steps).step] == [0, 1]
        assert pipeline.current_step() == 2  # waits for step 2, in which forwards of step 3 are done
        with pytest.raises(lp.LpPipeError, match="infinity"):
            next(steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_grad_norm": 1.0}, "clip_grad_norm with an asynchronous schedule"),
        ({"precision": "fp16"}, "take 'bf16'"),
    ],
)
def test_what_needs_all_stages_at_once_is_refused(options: dict[str, Any], message: str) -> None:
    model = pp.Model(layers(), squared_error, sgd)
    with (
        pytest.raises(pp.PipelineError, match=message),
        launched("thread", model, stages=2, schedule="pipedream", **options),
    ):
        pass


def test_check_is_for_synchronous_schedules() -> None:
    model = pp.Model(layers(), squared_error, sgd)
    with pytest.raises(pp.PipelineError, match="check the model with '1f1b'"):
        pp.check(model, BATCHES, stages=2, schedule="pipedream")


def test_an_update_of_micro_batches_that_all_weigh_nothing_names_these() -> None:
    # It was "the batch's micro-batches add up to 0.0", of a batch in which others have tokens.
    model = pp.Model(layers(), squared_error, sgd, loss_weight=lambda target: (target != 0).sum())
    x, y = random_batches([8])[0]
    y[4:] = 0
    with (
        launched("thread", model, stages=2, schedule="pipedream_2bw", microbatches=4) as pipeline,
        pytest.raises(pp.PipelineError, match="of micro-batches 2 to 3 of step 0, for which an asynchronous schedul"),
    ):
        pipeline.step((x, y))
