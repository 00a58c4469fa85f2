"""The large MLP of the examples does not fit its stages without recompute, and trains there with it."""

import re
import sys

import pytest

import lp_pipe as lp
from examples import big_mlp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(sys.platform != "linux", reason="its limit is Linux's"),
]

WITHIN_S = 100.0


def test_without_recompute_a_stage_runs_out_of_memory() -> None:
    with pytest.raises(lp.NodeError, match="can't allocate memory"):
        lp.launch(big_mlp.without_recompute(), "process").wait(WITHIN_S)


def test_with_recompute_it_trains(capfd: pytest.CaptureFixture[str]) -> None:
    lp.launch(big_mlp.make_program(steps=3), "process").wait(WITHIN_S)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capfd.readouterr().out)]
    assert len(losses) == 3 and losses[2] < losses[0]
