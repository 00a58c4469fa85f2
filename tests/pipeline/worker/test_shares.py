"""A worker's share of a checkpoint, which its successor does not have."""

import pytest

import lp_pipe as lp
from lp_pipe.pipeline.protocol import PlanShare
from lp_pipe.pipeline.saving.contents import Manifest
from lp_pipe.pipeline.worker.shares import Shares


def test_a_worker_that_was_started_again_counts_as_one_that_has_died() -> None:
    # A KeyError ended the training: only a death lets it go back to the checkpoint before.
    shares = Shares(0, dict, "stages/0 on h1")
    with pytest.raises(lp.Unavailable, match=r"stages/0 on h1 .*step-3"):
        shares.plan(PlanShare("step-3", Manifest(3, 0, None)))
