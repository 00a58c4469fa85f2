"""profile_memory: what stages hold, against what schedules and layers say that they must."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning.cost import Memory
from tests.pipeline.plain_loop import PlainLoop, adam, assert_same_state, launched, launched_many, random_batches, sgd

pytestmark = pytest.mark.usefixtures("no_leaks")

WIDTH = 64
ROWS = 16  # of a micro-batch
BATCHES = random_batches([4 * ROWS] * 3, WIDTH)
ACTIVATION = ROWS * WIDTH * 4  # bytes of one layer's output for one micro-batch
LAYERS = 4  # of each stage; each Sigmoid saves its output, which is also the next Linear's input


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()  # saves nothing


def memory_of(schedule: str, recompute: Any) -> list[pp.StageMemory]:
    model = pp.Model([pp.Layer(block) for _ in range(2 * LAYERS)], loss, adam)
    options = {"stages": [LAYERS], "schedule": schedule, "microbatches": 4, "recompute": recompute}
    with launched("thread", model, BATCHES, **options) as pipeline:
        pipeline.step()
        memory = pipeline.profile_memory(1)
        pipeline.step()
        plain = PlainLoop(model, 4)
        plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    return memory


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_activations_are_as_many_as_the_schedule_says(schedule: str) -> None:
    first, last = memory_of(schedule, "none")
    peaks = pp.peak_activations(pp.make_schedule(schedule, 2, 4))
    assert (first.worker, first.stages, last.worker, last.stages) == (0, (0,), 1, (1,))
    assert first.stash_bytes == LAYERS * ACTIVATION
    assert last.stash_bytes == (LAYERS + 1) * ACTIVATION  # and its input, which is no batch
    if schedule != "zb_h1":
        assert (first.deferred_bytes, last.deferred_bytes) == (0, 0)
        assert first.activation_bytes == peaks[0] * first.stash_bytes
        assert last.activation_bytes == peaks[1] * last.stash_bytes


def test_what_waits_for_a_w_is_counted() -> None:
    """Regression: profile_memory found 162 MiB in a process that took 258."""
    first, last = memory_of("zb_h1", "none")  # F0 F1 I0 W0 F2 I1 W1 ... and F0 I0 F1 I1 W0 F2 I2 W1 ...
    assert first.deferred_bytes == ACTIVATION  # the gradient of its output: all of its backward is left to W
    assert first.activation_bytes == 2 * first.stash_bytes + first.deferred_bytes
    # The gradient of each Linear's output; the last Sigmoid's own, which W does not need, goes when I ends.
    assert last.deferred_bytes == (LAYERS - 1) * ACTIVATION
    assert last.activation_bytes == 2 * (last.stash_bytes + last.deferred_bytes) + ACTIVATION


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("schedule", "versions"), [("pipedream", (2, 1)), ("pipedream_2bw", (2, 2))])
def test_an_asynchronous_stage_holds_its_activations_and_older_weights(
    schedule: str, versions: tuple[int, int], steps: int
) -> None:
    """It holds as many micro-batches as there are stages from this one on; PipeDream, section 3.3."""
    model = pp.Model([pp.Layer(block) for _ in range(2 * LAYERS)], loss, adam)
    batches = random_batches([4 * ROWS] * 6, WIDTH)
    options = {"stages": [LAYERS], "schedule": schedule, "microbatches": 4}
    with launched_many("thread", [(model, batches, options)] * 2) as (metered, other):
        results = metered.steps()
        losses = [next(results).loss]  # the loop is one step ahead of that, and the forwards of another
        first, last = metered.profile_memory(steps)
        losses += [result.loss for result in results]
        expected = [result.loss for result in other.steps()]
        assert metered.fingerprint() == other.fingerprint()
    assert losses == expected[:2] + expected[2 + steps :]
    parameters = LAYERS * (WIDTH + 1) * WIDTH * 4
    for stage, count in zip((first, last), versions, strict=True):
        assert (stage.parameter_bytes, stage.gradient_bytes) == (parameters, parameters)
        assert stage.weight_version_bytes == (count - 1) * parameters
    assert first.activation_bytes == 2 * LAYERS * ACTIVATION
    assert (last.stash_bytes, last.activation_bytes) == ((LAYERS + 1) * ACTIVATION,) * 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replicas_hold_what_plans_count_of_them(recompute: str) -> None:
    """A plan once counted stages, not devices: with replicas 1, 3 and 1 it knew of three of the first one's five."""
    schedules, replicas, microbatches = ["gpipe", "1f1b", "pipedream", "pipedream_2bw"], [1, 3, 1], 15
    model = pp.Model([pp.Layer(block) for _ in replicas], loss, adam)
    batches = random_batches([microbatches * ROWS] * 3, WIDTH)
    shared = {"stages": [1, 2], "replicas": replicas, "microbatches": microbatches, "recompute": recompute}
    pipelines = [(model, batches, {"schedule": schedule, **shared}) for schedule in schedules]
    with launched_many("thread", pipelines) as clients:
        for client in clients:
            client.step()  # in which recomputed layers keep copies, until it is known that they do not write to them
        found = {schedule: client.profile_memory(2) for schedule, client in zip(schedules, clients, strict=True)}
    for schedule, stages in found.items():
        memory = Memory(0.0, 0.0, schedule, recompute, microbatches)
        for stage in stages:
            waiting = memory.waiting_on(replicas[stage.worker], sum(replicas[stage.worker + 1 :]))
            entering = ACTIVATION if stage.worker else 0  # the first stage's inputs are the batch
            held = ACTIVATION + (entering if recompute == "none" else 0)  # a Linear saves its input, a plan its output
            counted = memory.needed(0, held, entering, waiting)
            where = (schedule, stage.worker, stage.replica)
            assert (*where, stage.activation_bytes) == (*where, counted)
            assert (*where, stage.weight_version_bytes) == (*where, (waiting.versions - 1) * stage.parameter_bytes)


def test_recompute_keeps_the_inputs_of_all_and_the_activations_of_one() -> None:
    first, last = memory_of("gpipe", "full")
    assert (first.stash_bytes, last.stash_bytes) == (0, ACTIVATION)  # the first stage's inputs are the batch
    assert first.activation_bytes == LAYERS * ACTIVATION
    # The last micro-batch runs again first; its input is one of the activations then.
    assert last.activation_bytes == (4 + LAYERS) * ACTIVATION


def test_parameters_gradients_and_state_are_counted() -> None:
    for stage in memory_of("1f1b", "none"):
        parameters = LAYERS * (WIDTH + 1) * WIDTH * 4
        assert (stage.parameter_bytes, stage.gradient_bytes, stage.buffer_bytes) == (parameters, parameters, 0)
        assert stage.weight_version_bytes == 0
        assert stage.optimizer_bytes == 2 * parameters + 2 * LAYERS * 4  # and Adam's step counters


def test_sparse_gradients_are_counted() -> None:
    """Regression: torch does not tell the bytes of Embedding(sparse=True)'s gradients, and the step failed."""
    model = pp.Model([nn.Embedding(100, WIDTH, sparse=True)], loss, sgd)
    batch = torch.arange(8).view(4, 2), torch.zeros(4)
    with launched("thread", model, stages=1, microbatches=1) as pipeline:
        (memory,) = pipeline.profile_memory(batch=batch)
    assert memory.gradient_bytes == 8 * (WIDTH * 4 + 8)  # of each row that was looked up its numbers and its place
