"""The example profiles, plans and trains a plain module, in threads."""

import re

import pytest

import lp_pipe as lp
from examples import auto_pipeline

pytestmark = pytest.mark.usefixtures("no_leaks")

WITHIN_S = 60.0


def test_a_plain_module_is_cut_by_its_profile_and_learns(capfd: pytest.CaptureFixture[str]) -> None:
    lp.launch(auto_pipeline.make_program(steps=12), "thread").wait(WITHIN_S)
    output = capfd.readouterr().out
    assert "2 stages on 2 of 2 devices" in output
    first, last = map(float, re.findall(r"loss (\S+) at first, (\S+) after", output)[0])
    assert last < first
