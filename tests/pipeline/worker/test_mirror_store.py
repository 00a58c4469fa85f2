"""Stage workers keep their own and their neighbour's last states in memory, and can go back to them, to the bit."""

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.protocol import Infer, KeepMirror, Mirror, Report
from lp_pipe.pipeline.saving.contents import Manifest
from lp_pipe.pipeline.worker.mirror_store import MirrorStore
from lp_pipe.pipeline.worker.worker import StageWorker
from lp_pipe.telemetry import waits
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    model_with_everything,
    random_batches,
    squared_error,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([6, 6, 5, 7, 6, 6])


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 3},
        {"stages": 2, "replicas": [1, 2]},
        {"stages": 2, "precision": "fp16"},
        {"stages": 2, "schedule": "zbv"},
        {"stages": 3, "schedule": "pipedream"},
    ],
    ids=str,
)
def test_all_go_back_to_a_mirrored_step_and_come_to_the_same_bits(options: dict[str, Any]) -> None:
    is_asynchronous = options.get("schedule") == "pipedream"
    model = small_model() if is_asynchronous else model_with_everything()
    with launched("thread", model, BATCHES, microbatches=4, **options) as pipeline:
        list(pipeline.steps(3))
        assert pipeline.mirror() == 3
        undisturbed = [result.loss for result in pipeline.steps(3)]
        fingerprint = pipeline.fingerprint()
        for _ in range(2):  # what it goes on with is not the mirror itself
            pipeline.go_back(3)
            assert pipeline.current_step() == 3
            assert [result.loss for result in pipeline.steps(3)] == undisturbed
            assert pipeline.fingerprint() == fingerprint


def small_model() -> pp.Model:
    return pp.Model([nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D), nn.Linear(D, D)], squared_error, adam)


def test_the_last_two_are_kept_and_forgotten_with_another_state(tmp_path: Path) -> None:
    with launched("thread", model_with_everything(), BATCHES, stages=2, microbatches=4) as pipeline:
        assert pipeline.mirrored_steps() == []
        pipeline.save(tmp_path)
        for _ in range(3):
            pipeline.step()
            pipeline.mirror()
        assert pipeline.mirrored_steps()[-2:] == [2, 3]
        pipeline.go_back(2)
        with pytest.raises(lp.RemoteError, match=r"go_back\(7\): .*\b2\b"):
            pipeline.go_back(7)
        assert pipeline.current_step() == 2 and pipeline.fingerprint()  # as before
        assert pipeline.mirrored_steps() == [2]  # step 3 comes again, and may come out otherwise
        pipeline.load(tmp_path)
        assert pipeline.mirrored_steps() == []
        assert pipeline.current_step() == 0


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_mirrors(tmp_path: Path) -> None:
    """Regression: the mirrors were forgotten first, and with a damaged checkpoint nothing was left to go back to."""
    with launched("thread", small_model(), BATCHES, stages=2) as pipeline:
        pipeline.step()
        pipeline.mirror()
        with pytest.raises(pp.CheckpointError, match="is no checkpoint"):
            pipeline.load(tmp_path / "missing")
        assert pipeline.mirrored_steps() == [1]
        pipeline.go_back(1)


def test_a_mirrored_step_is_the_plain_loops() -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, stages=2, microbatches=4) as pipeline:
        list(pipeline.steps(2))
        pipeline.mirror()
        list(pipeline.steps(2))
        pipeline.go_back(2)
        plain.steps(BATCHES[:2])
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_a_single_worker_has_no_neighbour() -> None:
    with (
        launched("thread", model_with_everything(), BATCHES, stages=1, microbatches=4) as pipeline,
        pytest.raises(lp.RemoteError, match="at least 2 stage workers"),
    ):
        pipeline.mirror()


def test_a_mirror_that_was_on_its_way_does_not_come_after_going_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # Step 2 comes again, and may be left out this time: a late copy of the first one's state would be taken for it.
    keep, may_come = MirrorStore.keep, threading.Event()
    arrived: list[int] = []

    def keep_slowly(mirrors: MirrorStore, command: KeepMirror) -> None:
        if command.rank != mirrors._rank and command.mirror.manifest.step == 2:
            assert may_come.wait(30.0)
            arrived.append(command.rank)
        keep(mirrors, command)

    monkeypatch.setattr(MirrorStore, "keep", keep_slowly)
    with launched("thread", model_with_everything(), BATCHES, stages=2, microbatches=4) as pipeline:
        for _ in range(2):
            pipeline.step()
            pipeline.mirror()
        release = threading.Timer(0.2, may_come.set)
        release.start()
        pipeline.go_back(1)
        release.join()
        until(lambda: len(arrived) == 2)
        assert pipeline.mirrored_steps() == [1]


def test_the_conductor_keeps_a_mirror_while_all_its_threads_wait_for_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One of these operations may be the next mirror(), which waits until the one before has been taken.
    nothing: Any = {}
    infer, may_go_on = StageWorker.infer, threading.Event()

    def infer_later(worker: StageWorker, command: Infer) -> Report:
        assert may_go_on.wait(30.0)
        return infer(worker, command)

    monkeypatch.setattr(StageWorker, "infer", infer_later)
    with launched("thread", small_model(), BATCHES, stages=2, microbatches=4) as pipeline:
        pipeline.step()
        conductor = pipeline._conductor
        evaluations = [conductor.futures.evaluate(BATCHES[:1]) for _ in range(max(pool.size for pool in waits.pools()))]
        until(lambda: any(pool.active >= pool.size for pool in waits.pools()))
        try:
            conductor.futures.keep_mirror(KeepMirror(1, Mirror(Manifest(1, 0), nothing))).result(10.0)
        finally:
            may_go_on.set()
        assert all(evaluation.result(30.0) == pipeline.evaluate(BATCHES[:1]) for evaluation in evaluations)
