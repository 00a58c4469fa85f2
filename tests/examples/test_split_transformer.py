"""The transformer of the examples is cut by export, learns real text, and comes back into the plain module."""

import re

import pytest

import lp_pipe as lp
from examples import split_transformer

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.slow]

WITHIN_S = 90.0


def test_the_transformer_learns_and_the_plain_module_says_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    lp.launch(split_transformer.make_program(steps=12), "thread").wait(WITHIN_S)
    output = capfd.readouterr().out
    first, last = (float(number) for number in re.findall(r"loss (\d+\.\d+)", output))
    assert first == pytest.approx(5.5, abs=0.3)  # as good as guessing: ln 256
    assert last < 4.0
    assert float(re.findall(r"differ from the pipeline's by (\S+) at most", output)[0]) < 1e-4
