"""Operations on all workers of a pipeline: when they end, and which failure counts."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.conductor.workers import Attempt
from lp_pipe.pipeline.protocol import Report
from lp_pipe.rpc.daemon_pool import DaemonPool


def test_an_attempt_ends_with_its_last_report_however_late_somebody_asks() -> None:
    """Asynchronous steps end while the caller does other things, which counted as part of them."""
    first: Future[Report] = Future()
    last: Future[Report] = Future()
    attempt = Attempt(lambda reason: None, [first, last], DaemonPool(1, "watchers"))
    first.set_result(Report())
    before = attempt.ended()
    last.set_result(Report())
    ended = attempt.ended()
    assert len(attempt.replies()) == 2
    assert attempt.ended() == ended >= before


class _TravelsOnce:
    """An object that unpickles once, as a data set that opens its files where it is loaded."""

    def __getstate__(self) -> dict[str, Any]:
        return {"path": "data", **vars(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.lock = threading.Lock()


def _loss(output: Tensor, target: tuple[Tensor, Any]) -> Tensor:
    return nn.functional.mse_loss(output, target[0])


def test_no_stage_waits_for_one_that_cannot_be_called() -> None:
    # The second stage had begun when the target turned out not to go to the third: it waited for ever.
    layers = [pp.Layer(nn.Linear, 2, 2) for _ in range(3)]
    program = lp.Program("once")
    handle = pp.add_pipeline(program, pp.Model(layers, _loss, torch.optim.Adam), stages=3, microbatches=2)
    x = torch.ones(4, 2)
    with lp.launch(program, "thread") as run:
        pipeline = run.client(handle)
        with pytest.raises(lp.SerializationError, match=r"stages/2\.train\(\): cannot pickle .*\.lock"):
            pipeline.step((x, (x, _TravelsOnce())))
        assert "in train\n" not in run.stacks()
        assert pipeline.step((x, (x, None))).step == 0
