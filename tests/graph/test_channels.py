"""The kinds of channels in the pictures of a pipeline."""

import json
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.graph import GraphView, to_dot, to_svg, to_text

SVG = "{http://www.w3.org/2000/svg}"


def pipeline(channel: str) -> lp.Program:
    program = lp.Program("train")
    model = pp.Model([nn.Linear(2, 2) for _ in range(3)], nn.MSELoss(), torch.optim.SGD)
    pp.add_pipeline(program, model, stages=3, channel=channel)
    return program


@pytest.mark.parametrize(
    ("channel", "mode", "chosen"),
    [("auto", "process", "shm"), ("auto", "thread", "inproc"), ("grpc", "process", "grpc"), ("gloo", "thread", "gloo")],
)
def test_an_edge_between_stages_says_which_kind_of_channel_it_is(channel: str, mode: str, chosen: str) -> None:
    view = GraphView.of(pipeline(channel), mode)
    edges = {(edge["user"], edge["server"]): edge.get("channel") for edge in json.loads(view.to_json())["edges"]}
    assert edges == {
        ("stages/0", "stages/1"): chosen,
        ("stages/0", "stages/2"): None,  # the conductor calls it, and no tensors pass
        ("stages/1", "stages/0"): chosen,
        ("stages/1", "stages/2"): chosen,
        ("stages/2", "stages/1"): chosen,
    }
    assert f'"stages/1" -> "stages/2" [label="{chosen}"' in to_dot(view)
    assert '"stages/0" -> "stages/2";' in to_dot(view)
    labels = [path.text for path in ET.fromstring(to_svg(view)).iter(f"{SVG}textPath")]
    assert labels == [chosen, chosen]


def test_text_names_the_stages_that_tensors_go_to() -> None:
    lines = to_text(GraphView.of(pipeline("auto"))).splitlines()
    assert lines[2].endswith("Conductor    → stages/1..2; shm: stages/1")
    assert lines[3].endswith("StageWorker  → stages/0, stages/2; shm: stages/0, stages/2")
