"""Channels that stay on one host are refused between two, before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.launch.dry_run import describe_launch
from lp_pipe.launch.engines import KubernetesEngine
from lp_pipe.launch.options import LaunchOptions

pytestmark = pytest.mark.usefixtures("no_leaks")


def pipeline(channel: str, **resources: Any) -> lp.Program:
    """Return a program with a pipeline of two stages."""
    layers = [pp.Layer(torch.nn.Linear, 1, 1), pp.Layer(torch.nn.Linear, 1, 1)]
    model = pp.Model(layers, torch.nn.functional.mse_loss, torch.optim.Adam)
    program = lp.Program("pipeline")
    pp.add_pipeline(program, model, stages=2, channel=channel, resources=lp.Resources(**resources))
    return program


@pytest.mark.parametrize("channel", ["shm", "inproc"])
def test_a_channel_that_stays_on_one_host_is_refused_between_two(channel: str) -> None:
    # The stages found out, and what to use instead was behind the internals of an endpoint.
    why = f"channel='{channel}' stays on one host, but stages/0 is to run on local0 and stages/1 on local1: use"
    with pytest.raises(ValueError, match=why):
        lp.launch(pipeline(channel), "multi_host", hosts="2")


def test_a_dry_run_refuses_it_as_well(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stages/0 is to run on host-0 and stages/1 on host-1"):
        describe_launch(
            pipeline("shm"), "multi_host", tmp_path, LaunchOptions(engine=KubernetesEngine("2", image="train:1"))
        )


def test_where_both_ends_are_on_one_host_it_is_taken(tmp_path: Path) -> None:
    program = pipeline("shm", host="host-1")
    lines = describe_launch(
        program, "multi_host", tmp_path, LaunchOptions(engine=KubernetesEngine("2", image="train:1"))
    )
    assert "stages/0 -> stages/1  channel shm" in lines
