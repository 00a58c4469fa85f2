"""The U-Net of the examples takes noise off real digits, with the same bits however it is cut."""

import re
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.pipeline as pp
from examples import unet

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("no_leaks")

WITHIN_S = 60.0


def output_of(capfd: pytest.CaptureFixture[str], **options: Any) -> str:
    lp.launch(unet.make_program(**options), "thread").wait(WITHIN_S)
    return capfd.readouterr().out


def test_the_network_is_better_than_the_noise_and_than_a_blur(capfd: pytest.CaptureFixture[str]) -> None:
    output = output_of(capfd, steps=80)
    noise, blur, network = (float(number) for number in re.findall(r"of .*: (0\.\d+)", output))
    assert network < 0.7 * min(noise, blur)


def test_every_cut_gives_the_same_parameters(capfd: pytest.CaptureFixture[str]) -> None:
    cuts: list[dict[str, Any]] = [{"stages": 1}, {"stages": [1, 2, 5], "schedule": "gpipe"}, {"stages": 3}]
    found = {re.findall(r"sha256 (\w+)", output_of(capfd, steps=3, **options))[0] for options in cuts}
    assert len(found) == 1


def test_it_trains_as_a_plain_loop_does() -> None:
    feeder = unet.Feeder()
    assert pp.check(unet.unet(), [feeder.batch(0), feeder.batch(1)], stages=3, microbatches=4).equal
