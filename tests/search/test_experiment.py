"""An experiment commits every row exactly once, and resumes trials from their checkpoints, in every mode."""

import math
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import lp_pipe as lp
import lp_pipe.pipeline as pp
import lp_pipe.search as ls
from lp_pipe.rpc import CourierClient
from lp_pipe.search.store import ExperimentFolder, Reading
from tests.waiting import until

SPACE = {"lr": ls.log(1e-4, 1.0), "opt": {"decay": ls.uniform(0.0, 0.1), "name": "sgd"}}
WITHIN_S = 60.0


class Model:
    """A state whose loss is a function of the parameters and the number of epochs."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.rate, self.epochs = params["lr"], 0

    def epoch(self) -> float:
        self.epochs += 1
        return abs(math.log10(self.rate) + 2.0) / self.epochs

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def trial(t: ls.Trial) -> None:
    model = Model(t.params)
    t.restore(model)
    for step in t.steps():
        loss = model.epoch()
        assert model.epochs == step
        t.report({"loss": loss}, checkpoint=model)


def trial_whose_slots_die(t: ls.Trial) -> None:
    model = Model(t.params)
    t.restore(model)
    for step in t.steps():
        if (t.id, t.attempt, step) in {(0, 1, 1), (2, 1, 1)}:
            os.kill(os.getpid(), signal.SIGKILL)
        t.report({"loss": model.epoch()}, checkpoint=model)


HALVING = ls.Halving("loss", max_trials=8, max_steps=4, divisor=2)


def committed(folder: Path) -> list[tuple[int, int, str, float]]:
    return sorted(row[:4] for row in ls.open(folder).rows())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int, str, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    program = ls.experiment("undisturbed", trial, space=SPACE, searcher=HALVING, slots=1, folder=folder / "e")
    lp.launch(program, "thread").wait(WITHIN_S)
    return committed(folder / "e")


def test_rows_do_not_depend_on_slots(undisturbed: list[tuple[int, int, str, float]], tmp_path: Path) -> None:
    program = ls.experiment("many", trial, space=SPACE, searcher=HALVING, slots=4, folder=tmp_path)
    assert ls.preview(program) == {1: 4, 2: 2, 4: 2}
    lp.launch(program, "thread").wait(WITHIN_S)
    assert committed(tmp_path) == undisturbed and len(undisturbed) == 4 + 2 * 2 + 2 * 4
    found = ls.open(tmp_path)
    best = found.best()
    assert best is not None and best.checkpoint is not None and best.checkpoint.is_dir()
    assert best.value == min(value for *_, value in undisturbed) and best.params == found.trials()[best.trial].params
    assert sorted(one.state for one in found.trials()) == ["finished"] * 2 + ["stopped"] * 6
    assert found.curves()[best.trial][-1] == (4, best.value)
    assert found.replay() == []


def test_slots_that_are_killed_lose_and_repeat_nothing(
    undisturbed: list[tuple[int, int, str, float]], tmp_path: Path, without_torch: None
) -> None:
    program = ls.experiment("killed", trial_whose_slots_die, space=SPACE, searcher=HALVING, slots=2, folder=tmp_path)
    lp.launch(program, "process").wait(WITHIN_S)
    assert committed(tmp_path) == undisturbed
    assert any(one.attempts > 1 for one in ls.open(tmp_path).trials())


def test_a_stopped_experiment_goes_on_where_it_was(
    undisturbed: list[tuple[int, int, str, float]], tmp_path: Path
) -> None:
    def stops_the_program(t: ls.Trial) -> None:
        model = Model(t.params)
        t.restore(model)
        for step in t.steps():
            if (t.id, t.attempt, step) == (3, 1, 1):
                lp.stop()
            t.report({"loss": model.epoch()}, checkpoint=model)

    def launched() -> None:
        program = ls.experiment(
            "on", stops_the_program, space=SPACE, searcher=HALVING, slots=2, folder=tmp_path / "experiment"
        )
        lp.launch(program, "thread").wait(WITHIN_S)

    launched()
    first = committed(tmp_path / "experiment")
    assert len(first) < len(undisturbed)
    assert "running" not in {one.state for one in ls.open(tmp_path / "experiment").trials()}
    launched()
    assert committed(tmp_path / "experiment") == undisturbed


def test_another_experiment_in_the_folder_is_refused(tmp_path: Path) -> None:
    searcher = ls.Random("loss", max_trials=1, max_steps=1)
    lp.launch(ls.experiment("one", trial, space=SPACE, searcher=searcher, folder=tmp_path), "thread").wait(WITHIN_S)
    ls.experiment("one", trial, space=SPACE, searcher=searcher, slots=3, folder=tmp_path)
    with pytest.raises(lp.LaunchError, match="space"):
        ls.experiment("one", trial, space={"lr": 1.0}, searcher=searcher, folder=tmp_path)
    with pytest.raises(lp.LaunchError, match="code"):
        ls.experiment("one", trial_whose_slots_die, space=SPACE, searcher=searcher, folder=tmp_path)
    with pytest.raises(lp.LaunchError, match="searcher"):
        ls.experiment("one", trial, space=SPACE, searcher=HALVING, folder=tmp_path)


def test_a_trial_that_raises_fails_and_the_others_go_on(tmp_path: Path) -> None:
    def fails(t: ls.Trial) -> None:
        if t.id == 2:
            raise ArithmeticError("in trial 2")
        if t.id == 1:
            raise ls.InvalidParams("too wide")
        trial(t)

    searcher = ls.Random("loss", max_trials=4, max_steps=2)
    lp.launch(ls.experiment("fails", fails, space=SPACE, searcher=searcher, slots=2, folder=tmp_path), "thread").wait(
        WITHIN_S
    )
    states = {one.id: one.state for one in ls.open(tmp_path).trials()}
    assert states == {0: "finished", 1: "invalid", 2: "failed", 3: "finished", 5: "finished"}
    assert "in trial 2" in (ls.open(tmp_path).trials()[2].error or "")


def trial_that_ends_its_process(t: ls.Trial) -> None:
    for _ in t.steps():
        if t.id == 0:
            os._exit(7)
        t.report({"loss": 1.0})


def test_a_trial_that_ends_its_process_fails_at_once(tmp_path: Path, without_torch: None) -> None:
    searcher = ls.Random("loss", max_trials=2, max_steps=1)
    program = ls.experiment("exits", trial_that_ends_its_process, space=SPACE, searcher=searcher, folder=tmp_path)
    lp.launch(program, "process").wait(WITHIN_S)
    exits, other = ls.open(tmp_path).trials()
    assert (exits.state, exits.attempts, other.state) == ("failed", 1, "finished")
    assert "exit code 7" in (exits.error or "")


def test_a_trial_that_prints_a_pattern_fails(tmp_path: Path) -> None:
    def prints(t: ls.Trial) -> None:
        for step in t.steps():
            if (t.id, step) == (1, 2):
                print("CUDA out of memory")
            t.report({"loss": 1.0})

    searcher = ls.Random("loss", max_trials=2, max_steps=4)
    options: dict[str, Any] = {
        "space": SPACE,
        "searcher": searcher,
        "slots": 2,
        "folder": tmp_path,
        "on_log": {"out of mem": "fail"},
    }
    lp.launch(ls.experiment("prints", prints, **options), "thread").wait(WITHIN_S)
    assert [(one.state, one.step) for one in ls.open(tmp_path).trials()] == [("finished", 4), ("failed", 2)]
    assert not type(sys.stdout).__module__.startswith("lp_pipe.search")
    with pytest.raises(ValueError, match="retry"):
        ls.experiment("prints", prints, **{**options, "on_log": {"a": "retry"}})
    with pytest.raises(ValueError, match=r"\("):
        ls.experiment("prints", prints, **{**options, "on_log": {"(": "fail"}})


def make_pipeline(t: ls.Trial) -> lp.Program:
    program = lp.Program(f"trial-{t.id}")
    model = pp.Model(
        [pp.Layer(torch.nn.Linear, 4, 4), torch.nn.Tanh(), pp.Layer(torch.nn.Linear, 4, 1)],
        torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=t.params["lr"]),
        seed=t.seed,
    )
    pipeline = pp.add_pipeline(program, model, stages=2, microbatches=2)
    program.add_node(lp.PyNode(train_pipeline, t, pipeline), label="trainer")
    return program


def train_pipeline(t: ls.Trial, pipeline: Any) -> None:
    t.restore(pipeline)
    for step in t.steps():
        inputs = torch.sin(torch.arange(16.0) * step).view(4, 4)
        t.report({"loss": pipeline.step((inputs, inputs.sum(1, keepdim=True))).loss}, checkpoint=pipeline)
    lp.stop()


def test_a_trial_may_be_a_pipeline(tmp_path: Path) -> None:
    searcher = ls.Halving("loss", max_trials=4, max_steps=4, divisor=2)
    for slots in (1, 2):
        program = ls.experiment(
            "pipelines",
            ls.program(make_pipeline),
            space=SPACE,
            searcher=searcher,
            slots=slots,
            folder=tmp_path / f"{slots}",
        )
        lp.launch(program, "thread").wait(WITHIN_S)
    assert len(committed(tmp_path / "1")) == 8 and committed(tmp_path / "1") == committed(tmp_path / "2")
    assert sorted(one.state for one in ls.open(tmp_path / "1").trials()) == ["finished"] + ["stopped"] * 3


def test_a_fork_goes_on_from_a_checkpoint_with_another_parameter(tmp_path: Path) -> None:
    searcher = ls.Random("loss", max_trials=1, max_steps=3)
    program = ls.experiment("parent", trial, space=SPACE, searcher=searcher, folder=tmp_path / "parent")
    lp.launch(program, "thread").wait(WITHIN_S)
    parent = ls.open(tmp_path / "parent")
    for from_checkpoint, attempts in ((False, {1}), (True, {0})):
        program = ls.fork(parent, 0, {"opt.decay": 0.5}, from_checkpoint=from_checkpoint)
        lp.launch(program, "thread").wait(WITHIN_S)
        forked = ls.open(tmp_path / program.name)
        (only,) = forked.trials()
        assert only.params["opt"]["decay"] == 0.5 and only.params["lr"] == parent.trials()[0].params["lr"]
        kept = parent.trials()[0].checkpoint
        assert kept is not None and kept.is_dir()  # the fork deletes its own alone
        assert [row.step for row in forked.rows()] == [1, 2, 3] and {row.attempt for row in forked.rows()} == attempts
    with pytest.raises(ValueError, match=r"decoy.*decay"):
        ls.fork(parent, 0, {"opt.decoy": 0.5})


def test_an_experiment_whose_trials_all_fail_ends_with_their_error(tmp_path: Path) -> None:
    def fails(t: ls.Trial) -> None:
        raise ArithmeticError(f"in trial {t.id}")

    searcher = ls.Random("loss", max_trials=2, max_steps=2)
    run = lp.launch(ls.experiment("all", fails, space=SPACE, searcher=searcher, folder=tmp_path), "thread")
    with pytest.raises(lp.NodeError, match=r"AllTrialsFailed.*2 trials") as failure:
        run.wait(WITHIN_S)
    assert failure.value.label == "searcher" and "in trial 1" in str(failure.value)


def test_a_killed_trial_is_stopped_and_a_pause_shows(tmp_path: Path) -> None:
    entered, left = tmp_path / "entered", tmp_path / "left"  # a trial is pickled: it can hold no event

    def waits(t: ls.Trial) -> None:
        for _ in t.steps():
            if t.id == 1 and not left.exists():
                entered.touch()
                until(left.exists)
            t.report({"loss": float(t.id)})

    searcher = ls.Random("loss", max_trials=3, max_steps=3)
    program = ls.experiment("killed", waits, space=SPACE, searcher=searcher, folder=tmp_path)
    with lp.launch(program, "thread") as run:
        until(entered.exists)
        with closing(Reading(tmp_path, "loss")) as reading:
            client = CourierClient(str(reading.facts()["address"]))
        assert client.lease(0, "a process that was taken for dead") is None
        with pytest.raises(ls.StaleAttempt):
            client.report(1, 0, 1, {"loss": 9.0}, None)
        client.kill(1)
        client.pause()
        left.touch()
        until(lambda: client.state() == "paused")
        assert client.resume() and not client.resume()
        run.wait(WITHIN_S)
    found = ls.open(tmp_path)
    assert [(one.state, one.step) for one in found.trials()] == [("finished", 3), ("stopped", 0), ("finished", 3)]
    assert found.replay() == []


def test_a_paused_trial_is_said_to_be_paused(tmp_path: Path) -> None:
    def slow(t: ls.Trial) -> None:
        for _ in t.steps():
            t.report({"loss": 1.0})
            time.sleep(0.002)

    searcher = ls.Random("loss", max_trials=1, max_steps=1_000_000)
    program = ls.experiment("paused", slow, space=SPACE, searcher=searcher, folder=tmp_path)
    with lp.launch(program, "thread"):
        until(lambda: ExperimentFolder(tmp_path).owner() and ls.open(tmp_path).rows())
        with closing(Reading(tmp_path, "loss")) as reading:
            client = CourierClient(str(reading.facts()["address"]))
        client.pause()
        until(lambda: client.state() == "paused")
        assert [one.state for one in ls.open(tmp_path).trials()] == ["paused"]


@pytest.mark.parametrize("searcher", [ls.Random("loss", 2, 1), ls.Grid("loss", 1)], ids=["random", "grid"])
def test_invalid_parameters_without_others_end_the_experiment(searcher: Any, tmp_path: Path) -> None:
    def refuses(t: ls.Trial) -> None:
        if t.id == 0:
            raise ls.InvalidParams("never")
        trial(t)

    program = ls.experiment("invalid", refuses, space={"lr": 0.1}, searcher=searcher, folder=tmp_path)
    run = lp.launch(program, "thread")
    if isinstance(searcher, ls.Grid):  # its only trial
        with pytest.raises(lp.NodeError):
            run.wait(WITHIN_S)
        assert [one.state for one in ls.open(tmp_path).trials()] == ["invalid"]
    else:
        run.wait(WITHIN_S)
        assert [one.state for one in ls.open(tmp_path).trials()] == ["failed", "finished"]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (ls.Keep(1, 0, 0), {(0, 2)}),
        (ls.Keep(2, 0, 0), {(0, 2), (0, 3)}),
        (ls.Keep(0, 0, 1), {(0, 4), (1, 4)}),
        (ls.Keep(1, 1, 1), {(0, 2), (0, 4), (1, 2), (1, 4)}),
    ],
)
def test_keep_is_the_union_of_its_three(keep: ls.Keep, kept: set[tuple[int, int]], tmp_path: Path) -> None:
    def curve(t: ls.Trial) -> None:
        model = Model({"lr": 1.0})
        t.restore(model)
        for step in t.steps():
            t.report({"loss": 10.0 * t.id + (0.0, 5.0, 1.0, 2.0, 3.0)[step]}, checkpoint=model)

    searcher = ls.Random("loss", max_trials=2, max_steps=4)
    program = ls.experiment("keep", curve, space=SPACE, searcher=searcher, keep=keep, folder=tmp_path)
    lp.launch(program, "thread").wait(WITHIN_S)
    with closing(Reading(tmp_path, "loss")) as reading:
        named = {(owner, step): Path(path) for path, owner, step, _ in reading.checkpoints()}
    assert named.keys() == kept
    assert set(tmp_path.glob("trials/*/checkpoints/attempt-*/*")) == set(named.values())
