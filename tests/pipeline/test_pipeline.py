"""The operations of a pipeline for its clients, one or several."""

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.context import current_context
from lp_pipe.pipeline.schedule import registry
from lp_pipe.program import Edge
from tests.pipeline.plain_loop import (
    D,
    Feeder,
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    launched_many,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

WITHIN_S = 20.0
BATCHES = random_batches([6, 6, 6, 6])
LINEAR = pp.Layer(nn.Linear, D, D)


def train(pipeline: pp.PipelineClient, losses: list[float]) -> None:
    """A node's work: the client is all it needs."""
    for result in pipeline.steps():
        losses.append(result.loss)
    lp.stop()


def test_a_node_trains_a_model_through_its_handle() -> None:
    losses: list[float] = []
    program = lp.Program("train")
    feeder = program.add_node(lp.CourierNode(Feeder, BATCHES), label="feeder")
    model = pp.Model([nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)], squared_error, adam)
    pipeline = pp.add_pipeline(program, model, stages=2, microbatches=3, inputs=feeder)
    program.add_node(lp.PyNode(train, pipeline, losses), label="trainer")
    lp.launch(program, "thread").wait(WITHIN_S)
    assert losses == PlainLoop(model, 3).steps(BATCHES)


def test_who_has_a_client_may_draw_random_numbers_in_thread_mode() -> None:
    # A later stage was still building: the script's numbers and its initial weights came from one generator, by chance.
    has_client = threading.Event()
    was_late: list[bool] = []

    def last() -> nn.Module:
        if current_context() is not None:  # not in the program's setup
            was_late.append(has_client.wait(0.2))
        return nn.Linear(D, D)

    for _ in range(2):  # the first time stage 0 may be late itself: it imports
        program = lp.Program("drawing")
        model = pp.Model([LINEAR, LINEAR, pp.Layer(last)], squared_error, adam)
        pipeline = pp.add_pipeline(program, model, stages=3, microbatches=2)
        has_client.clear()
        with lp.launch(program, "thread") as run:
            run.client(pipeline)
            has_client.set()
    assert was_late == [False, False]


def test_numbers_of_numpy_and_torch_are_as_good_as_pythons() -> None:
    model, plain = model_with_everything(), PlainLoop(model_with_everything(), 4, clip_grad_norm=0.5)
    options: dict[str, Any] = {"stages": np.array([2, 4]), "recompute": ("every", np.int64(2)), "channel": "inproc"}
    options |= {"microbatches": np.int64(4), "clip_grad_norm": torch.tensor(0.5)}
    with launched("thread", model, BATCHES, **options) as one:
        assert [result.loss for result in one.steps()] == plain.steps(BATCHES)
    program = lp.Program("cut")
    pp.add_pipeline(program, pp.Model([LINEAR, LINEAR], squared_error, sgd), stages=torch.tensor([1]))
    assert len(program.groups["stages"]) == 2
    replicated = pp.Model([LINEAR, LINEAR], squared_error, sgd)
    pp.add_pipeline(program, replicated, group="replicas", stages=2, replicas=torch.tensor(2))  # type: ignore[arg-type]
    assert len(program.groups["replicas"]) == 4


def test_the_graph_shows_who_talks_to_whom() -> None:
    program = lp.Program("graph")
    feeder = program.add_node(lp.CourierNode(Feeder, BATCHES), label="feeder")
    pipeline = pp.add_pipeline(program, model_with_everything(), stages=3, inputs=feeder)
    program.add_node(lp.PyNode(train, pipeline, []), label="trainer")
    assert set(program.edges()) == {
        # The first stage and the last one ask the feeder, and the first one conducts.
        *(Edge(user, "feeder/0") for user in ("stages/0", "stages/2")),
        Edge("stages/0", "stages/2"),
        # Activations and gradients; stage 0 also calls stage 1.
        *(Edge("stages/1", server, "auto") for server in ("stages/0", "stages/2")),
        *(Edge(user, "stages/1", "auto") for user in ("stages/0", "stages/2")),
        Edge("trainer/0", "stages/0"),
    }


def test_a_step_tells_what_it_did() -> None:
    with launched("thread", model_with_everything(), BATCHES, stages=2, microbatches=4) as pipeline:
        first, second = pipeline.step(), pipeline.step()
    assert (first.step, second.step) == (0, 1)
    assert first.metrics["mae"] > 0 and first.metrics["count"] == 2.0  # each micro-batch's, weighted as its loss is
    assert first.seconds > 0
    assert len(first.utilization) == 2 and all(0 < share <= 1 for share in first.utilization)
    assert first.bubble_fraction == pytest.approx(1 - sum(first.utilization) / 2)


def test_a_number_of_steps_is_a_whole_one() -> None:
    # A bare TypeError, of an addition, and in `steps` not before the first one.
    number: Any = "3"
    with launched("thread", model_with_everything(), BATCHES, stages=2) as pipeline:
        for method in ("steps", "trace", "profile_memory"):
            with pytest.raises(pp.PipelineError, match=rf"{method}\('3'\): give a number of steps \(int\)"):
                getattr(pipeline, method)(number)
        assert [result.step for result in pipeline.steps(np.int64(2))] == [0, 1]


def test_steps_end_with_the_data_and_a_single_step_says_so() -> None:
    with launched("thread", model_with_everything(), BATCHES, stages=2) as pipeline:
        assert [result.step for result in pipeline.steps(1)] == [0]
        assert [result.step for result in pipeline.steps()] == [1, 2, 3]
        assert list(pipeline.steps(5)) == []
        assert list(pipeline.steps(2 - pipeline.current_step())) == []  # it has gone further already
        with pytest.raises(pp.EndOfData, match="no batch for step 4"):
            pipeline.step()
        assert pipeline.step(BATCHES[0]).step == 4  # a batch that the client brings is still welcome
        assert pipeline.current_step() == 5


def test_a_trace_has_every_action_of_every_worker() -> None:
    with launched("thread", model_with_everything(), BATCHES, stages=2, schedule="gpipe", microbatches=2) as pipeline:
        traces = pipeline.trace(2)
        assert [trace.step for trace in traces] == [0, 1]
        first, second = traces[1].workers
        assert [action for action, _, _ in first] == ["0F0", "0F1", "0B0", "0B1"]
        assert [action for action, _, _ in second] == ["1F0", "1F1", "1B0", "1B1"]
        for spans in (first, second):
            times = [time for _, start, end in spans for time in (start, end)]
            assert times == sorted(times) and times[0] >= traces[1].began
        assert pipeline.current_step() == 2


def test_the_trace_of_a_run_has_the_times_of_the_pipelines_trace(tmp_path: Path) -> None:
    program = lp.Program("traced")
    feeder = program.add_node(lp.CourierNode(Feeder, BATCHES), label="feeder")
    pipeline = pp.add_pipeline(program, model_with_everything(), stages=2, microbatches=2, inputs=feeder)
    with lp.launch(program, "thread", run_dir=tmp_path, trace=True) as run:
        traces = run.client(pipeline).trace(2)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    words = {"F": "forward", "B": "backward"}
    found = {
        (one["args"]["step"], one["name"], one["args"]["stage"], one["args"]["microbatch"]): one["dur"] / 1e6
        for one in events
        if one.get("cat") == "compute"
    }
    said = {
        (trace.step, words[name[1]], int(name[0]), int(name[2])): end - start
        for trace in traces
        for worker in trace.workers
        for name, start, end in worker
    }
    assert found.keys() == said.keys() and len(said) == 16
    assert all(abs(found[key] - said[key]) < 1e-8 for key in said)
    sent, received = ({one["id"] for one in events if one["ph"] == kind} for kind in "sf")
    assert sent == received and len(sent) == 8
    assert len([one for one in events if one.get("cat") == "predicted"]) == 16


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_pipeline_without_a_feeder_is_traced_and_metered_on_a_batch(schedule: str) -> None:
    """Each of the steps is on this batch."""
    options = {"stages": 2, "microbatches": 2, "schedule": schedule}
    with launched_many("thread", [(model_with_everything(loss=squared_error), None, options)] * 2) as (shown, plain):
        assert [trace.step for trace in shown.trace(2, BATCHES[0])] == [0, 1]
        assert [memory.worker for memory in shown.profile_memory(batch=BATCHES[0])] == [0, 1]
        for _ in range(3):
            plain.step(BATCHES[0])
        assert shown.fingerprint() == plain.fingerprint()


# State.


def test_state_has_the_names_and_order_of_the_whole_sequential() -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 1)
    with launched("thread", model, BATCHES, stages=2, schedule="interleaved", chunks=2) as pipeline:
        list(pipeline.steps())
        state = pipeline.state_dict()
        plain.module.load_state_dict(state)  # plain torch takes it
        x = BATCHES[0][0]
        assert torch.equal(pipeline.forward(input=x), plain.output(x))

        names = list(state)
        pipeline.load_state_dict({name: torch.zeros_like(state[name]) for name in reversed(names)})
        assert not any(value.any() for value in pipeline.state_dict().values())
        pipeline.load_state_dict(sd=state)
        assert_same_state(pipeline.state_dict(), state)


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    with launched("thread", model_with_everything(), stages=2) as pipeline:
        state = pipeline.state_dict()
        with pytest.raises(pp.PipelineError, match=r"missing \['0\.weight'\], unknown \['wrong'\]"):
            pipeline.load_state_dict({("wrong" if k == "0.weight" else k): v for k, v in state.items()})
        with pytest.raises(pp.PipelineError, match=r"8\.bias has shape \[1\] there and \[8\] here"):
            zeros = {name: torch.zeros_like(value) for name, value in state.items()}
            pipeline.load_state_dict({**zeros, "8.bias": torch.zeros(1)})
        assert_same_state(pipeline.state_dict(), state)


def test_the_fingerprint_is_a_sha256_of_all_bytes_in_order() -> None:
    model = model_with_everything()
    fingerprints = set()
    for mode, options in [
        ("thread", {"stages": 1}),
        ("thread", {"stages": 4}),
        ("thread", {"stages": 2, "schedule": "looped_bfs", "chunks": 2}),
        ("thread", {"stages": 2, "schedule": "zbv"}),
        ("process", {"stages": 2}),
    ]:
        with launched(mode, model, BATCHES, microbatches=2, **options) as pipeline:
            list(pipeline.steps())
            fingerprints.add(pipeline.fingerprint())
            state = pipeline.state_dict()
    raw = b"".join(value.numpy().tobytes() for value in state.values())
    assert fingerprints == {hashlib.sha256(raw).hexdigest()}


class Odd(nn.Module):
    """Buffers of every kind, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.ones(0, 3))
        self.register_buffer("strided", torch.arange(6).reshape(2, 3).t())
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_state_of_every_kind_has_a_fingerprint_and_travels() -> None:
    model = pp.Model([pp.Layer(Odd), LINEAR], squared_error, sgd)
    with launched("thread", model, stages=2) as pipeline:
        fingerprint = pipeline.fingerprint()
        state = pipeline.state_dict()
        assert list(state) == list(nn.Sequential(Odd(), nn.Linear(D, D)).state_dict())
        pipeline.load_state_dict(state)
        assert pipeline.fingerprint() == fingerprint


# Several clients.


class Half(nn.Module):
    """A layer that shows the first number of its parameter in evaluations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, seen: list[Tensor]) -> list[Tensor]:
        return [*seen, self.weight[:1] + 0 * self.weight.mean()]


def _falls_by_one(output: list[Tensor], target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return a loss that gives both halves a gradient of 1 in their first number."""
    first, second = output[-2:]
    return (first + second).sum() * target.mean(), {"gap": (first - second).abs().max(), "first": first[0]}


def test_operations_of_several_clients_are_whole() -> None:
    """Both stages' weights fall by 1 in every step: an evaluation with two that differ has seen half a step."""
    steps, stop = 40, threading.Event()
    seen: dict[str, list[float]] = {"evaluate": [], "forward": [], "state": []}
    one = torch.ones(1, 1)

    def look(name: str, once: Any) -> None:
        while not stop.is_set():
            first, second = once()
            assert first == second
            seen[name].append(first)

    def evaluate(pipeline: pp.PipelineClient) -> tuple[float, float]:
        metrics = pipeline.evaluate([([one], one), ([one], one)]).metrics
        return metrics["first"], metrics["first"] + metrics["gap"]

    def forward(pipeline: pp.PipelineClient) -> tuple[float, float]:
        *_, first, second = pipeline.forward([one])
        return first.item(), second.item()

    def state(pipeline: pp.PipelineClient) -> tuple[float, float]:
        weights = [value[0].item() for value in pipeline.state_dict().values()]
        return weights[0], weights[1]

    def drive(pipeline: pp.PipelineClient) -> None:
        for _ in range(steps):
            pipeline.step(([one], one))
        while not all(-steps in values for values in seen.values()):
            assert not lp.wait_for_stop(0.001)
        stop.set()

    program = lp.Program("several clients")
    model = pp.Model([pp.Layer(Half, 2**16), pp.Layer(Half, 8)], _falls_by_one, lambda p: torch.optim.SGD(p, lr=1.0))
    handle = pp.add_pipeline(program, model, stages=2, microbatches=1)
    for function in (evaluate, forward, state):
        node = lp.PyNode(lambda pipeline, f=function: look(f.__name__, lambda: f(pipeline)), handle)
        program.add_node(node, label=function.__name__)
    program.add_node(lp.PyNode(drive, handle), label="driver")
    with lp.launch(program, "thread") as run:
        finished = stop.wait(WITHIN_S)
        assert finished, run.status()
    for values in seen.values():
        assert values == sorted(values, reverse=True)


def test_a_state_is_that_of_one_moment_though_steps_go_on() -> None:
    """The first stage handed its own tensors to the reply, and the next step wrote to them while that was sent."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2**22))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.sum() * x

    model = pp.Model([pp.Layer(Large)], lambda output, target: output.sum(), lambda p: torch.optim.SGD(p, lr=1.0))
    stop = threading.Event()
    with launched("thread", model, stages=1, microbatches=1) as pipeline:

        def step() -> None:
            while not stop.is_set():
                pipeline.step((torch.ones(1), torch.ones(1)))

        stepping = threading.Thread(target=step)
        stepping.start()
        try:
            for _ in range(10):
                low, high = pipeline.state_dict()["0.weight"].aminmax()
                assert low == high
        finally:
            stop.set()
            stepping.join(WITHIN_S)


def test_a_given_schedule_is_for_its_number_of_microbatches() -> None:
    schedule = pp.make_schedule("gpipe", stages=2, microbatches=3)
    model = model_with_everything()
    plain = PlainLoop(model, 3)
    with launched("thread", model, schedule=schedule, microbatches=3) as pipeline:
        with pytest.raises(pp.ScheduleError, match="written for 3 micro-batches, but this batch splits into 2"):
            pipeline.step(random_batches([2])[0])
        assert pipeline.step(BATCHES[0]).loss == plain.step(BATCHES[0])


def test_a_schedule_may_come_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(pp.make_schedule("1f1b", stages=2, microbatches=3).to_csv())
    model = model_with_everything()
    plain = PlainLoop(model, 3)
    with launched("thread", model, BATCHES, schedule=path, microbatches=3) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)


@pytest.fixture
def _registered_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPipe, as a function that only this process knows; for one micro-batch it makes something else."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    @pp.register_schedule("mine")
    def mine(stages: int, microbatches: int, chunks: int) -> pp.Schedule:
        every = range(microbatches)
        workers = [[pp.Action(op, stage, j) for op in ("F", "B") for j in every] for stage in range(stages)]
        return pp.Schedule("mine", tuple(map(tuple, workers if microbatches > 1 else workers[::-1])))


@pytest.mark.parametrize(
    ("mode", "resources"),
    [
        pytest.param("thread", None, id="thread"),
        pytest.param("process", None, id="process"),
        pytest.param("process", lp.Resources(fresh_interpreter=True), id="fresh", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("_registered_schedule")
def test_a_registered_schedule_is_known_in_the_stages(mode: str, resources: lp.Resources | None) -> None:
    """Regression: the stages' processes did not know the schedule."""
    model, batches = model_with_everything(), random_batches([6, 2])
    plain = PlainLoop(model, 3)
    with launched(mode, model, schedule="mine", microbatches=3, resources=resources) as pipeline:
        assert [pipeline.step(batch).loss for batch in batches] == plain.steps(batches)


@pytest.mark.usefixtures("_registered_schedule")
def test_a_registered_schedule_is_proven_for_small_batches_too() -> None:
    model = model_with_everything()
    with launched("thread", model, schedule="mine", microbatches=3) as pipeline:
        with pytest.raises(pp.ScheduleError, match=r"stages on workers \(1, 0\) with microbatches=1"):
            pipeline.step(random_batches([1])[0])
        assert pipeline.step(BATCHES[0]).loss == PlainLoop(model, 3).step(BATCHES[0])


def test_two_pipelines_of_one_program_do_not_disturb_each_other() -> None:
    def both(pipelines: list[pp.PipelineClient]) -> Iterator[list[float]]:
        threads_losses: list[list[float]] = [[], []]
        threads = [
            threading.Thread(target=lambda p=p, out=out: out.extend(r.loss for r in p.steps()))
            for p, out in zip(pipelines, threads_losses, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        yield from threads_losses

    program = lp.Program("two")
    feeder = program.add_node(lp.CourierNode(Feeder, BATCHES), label="feeder")
    models = [model_with_everything(seed=seed) for seed in (1, 2)]
    handles = [
        pp.add_pipeline(program, model, stages=2, microbatches=4, inputs=feeder, group=f"group{index}")
        for index, model in enumerate(models)
    ]
    with lp.launch(program, "thread") as run:
        losses = list(both([run.client(handle) for handle in handles]))
    assert losses == [PlainLoop(model, 4).steps(BATCHES) for model in models]
