"""A model that `replica.shard` has sharded trains to the bits of one process, and is refused where it could not."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from lp_pipe.errors import NotSupported
from tests.data_parallel.loops import SEED, build, differences, plain_loop, train

STEPS = 8


def test_a_sharded_model_built_on_the_meta_device_trains_as_one_process(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options: dict[str, Any] = {"replicas": 3, "workers": 2, "seed": SEED, "zero": 3, "is_meta": True}
    dp.add_replicas(program, train, str(tmp_path), STEPS, 2, **options)
    launched(program, "process").wait(60)
    assert differences(tmp_path, *plain_loop(STEPS, 3, 2)) == []


CASES = [(zero, workers, clip) for zero in (2, 3) for workers in (1, 2, 3, 4) for clip in (None, 0.5)]


@pytest.mark.parametrize(
    ("zero", "workers", "clip"),
    [pytest.param(*case, marks=[] if case == (3, 1, None) else pytest.mark.slow) for case in CASES],
)
def test_sharded_models_train_as_one_process(
    launched: Any, zero: int, workers: int, clip: float | None, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options: dict[str, Any] = {"replicas": 4, "workers": workers, "seed": SEED, "zero": zero, "clip": clip}
    dp.add_replicas(program, train, str(tmp_path), STEPS, 2, **options)
    launched(program, "process").wait(60)
    assert differences(tmp_path, *plain_loop(STEPS, 4, 2, clip)) == []


@pytest.mark.slow
def test_a_sharded_model_is_resumed_by_other_workers_and_with_another_zero(launched: Any, tmp_path: Path) -> None:
    for workers, steps, zero in [(3, 4, 3), (2, 6, 2), (4, STEPS, 1)]:
        program = lp.Program("replicas")
        options: dict[str, Any] = {"replicas": 4, "workers": workers, "seed": SEED, "zero": zero, "save_every": 2}
        dp.add_replicas(program, train, str(tmp_path), steps, **options)
        launched(program, "process", run_dir=tmp_path / "run").wait(60)
        assert differences(tmp_path, *plain_loop(steps, 4)) == []
        for file in tmp_path.glob("rank*.pt"):
            file.unlink()


def shards(replica: dp.Replica, zero: int) -> None:
    replica.shard(build(), zero)


def shards_by_optimizer(replica: dp.Replica, zero: int) -> None:
    model = build()
    replica.optimizer(torch.optim.SGD(model.parameters()), model, zero=zero)


@pytest.mark.parametrize(
    ("train", "zero", "options", "word"),
    [
        (shards, 3, {}, "mode='process'"),
        (shards, 2, {"on_failure": "shrink"}, "on_failure"),
        (shards_by_optimizer, 3, {}, "replica.shard"),
    ],
)
def test_where_models_cannot_be_sharded_they_are_refused(
    train: Any, zero: int, options: dict[str, Any], word: str, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, train, zero, replicas=2, **options)
    with pytest.raises(lp.NodeError, match=word) as failed:
        lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(timeout=60)
    assert failed.value.type_name == NotSupported.__name__
