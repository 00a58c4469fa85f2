"""lp_pipe/telemetry/numbers.py"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lp_pipe as lp
from lp_pipe.telemetry.numbers import as_numbers

WITHIN_S = 30


def test_numbers_of_numpy_and_torch_are_logged_in_thread_mode_as_in_processes(no_leaks: None, tmp_path: Path) -> None:
    # A loss of np.float32 ended the node in thread mode: "not JSON serializable".
    def log() -> None:
        lp.log_metrics({"a": np.float32(1.5), "b": torch.tensor(2.5), "c": np.array(3), "d": True}, step=np.int64(4))

    program = lp.Program("numbers")
    program.add_node(lp.PyNode(log), label="node")
    lp.launch(program, "thread", run_dir=tmp_path).wait(WITHIN_S)
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["step"], record["values"]) == (4, {"a": 1.5, "b": 2.5, "c": 3.0, "d": 1.0})


@pytest.mark.parametrize(
    ("metrics", "step", "message"),
    [
        ({"loss": "0.5"}, None, "'loss' is of type str, but one number is needed"),
        ({"loss": None}, None, "'loss' is of type NoneType"),
        ({"loss": torch.ones(3)}, None, "'loss' is of type Tensor"),
        ({"loss": 10**400}, None, "'loss' is of type int"),
        ("loss", None, r"log_metrics\('loss'\): a dict of names and numbers is needed"),
        ({1: 2.0}, None, "the name 1 of a metric is not a str"),
        ({"loss": 1.0}, 1.5, "step=1.5: an int is needed"),
    ],
)
def test_what_is_no_number_is_named(metrics: Any, step: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_numbers(metrics, step)
