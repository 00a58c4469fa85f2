"""A worker that was started again is not taken for the one that it follows."""

import pytest

import lp_pipe as lp
from lp_pipe.pipeline.protocol import IsAsBuilt, Join
from lp_pipe.pipeline.worker.restart_check import RestartCheck


def test_a_worker_that_was_started_again_keeps_its_initial_weights_to_itself() -> None:
    # A stage that was killed between a step and its save, and was back in time, had the initial weights saved.
    successor = RestartCheck("stages/1")
    with pytest.raises(lp.Unavailable, match="stages/1 was started again, with the initial weights"):
        successor.check_joined()
    successor.rejoin()
    successor.check_joined()


def test_a_conductor_that_was_started_again_finds_workers_that_knew_another() -> None:
    worker = RestartCheck("stages/1")
    worker.join(Join())
    with pytest.raises(lp.Unavailable, match="the first worker was started again"):
        worker.join(Join())


def test_what_nobody_has_trained_is_as_built() -> None:
    worker = RestartCheck("stages/1")
    worker.join(Join())
    assert worker.is_as_built(IsAsBuilt())
    worker.note_change()
    assert not worker.is_as_built(IsAsBuilt())
