"""Metrics as plain lines."""

import math

import pytest

from lp_pipe.cli.display import PlainDisplay, metrics_line, number
from lp_pipe.telemetry.metrics import MetricsRecord


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def record(step: int, node: str = "trainer/0", **values: float) -> MetricsRecord:
    return MetricsRecord(float(step), node, step, values or {"loss": step / 10})


def test_a_line_has_node_step_and_values() -> None:
    values = {"loss": 2.41321, "chars_per_s": 11200.4, "total_steps": 1000}
    assert metrics_line(record(120, **values)) == "trainer/0  step 120/1000  loss 2.413  chars_per_s 11200"
    assert metrics_line(MetricsRecord(0.0, "feeder/0", None, {"read": 7})) == "feeder/0  read 7"


def test_first_and_last_record_are_printed_and_others_every_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with PlainDisplay(every_s=2.0, clock=clock) as display:
        for step in range(8):
            clock.now = step * 0.6
            display.metrics(record(step))
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["0", "4", "7"]


def test_nodes_and_rare_kinds_of_records_are_not_lost_in_frequent_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainDisplay(every_s=2.0, clock=Clock()) as display:
        for step in range(5):
            display.metrics(record(step))
        display.metrics(record(5, validation_loss=0.5))
        display.metrics(record(6, node="stages/1"))
    assert capsys.readouterr().out.splitlines() == [
        "trainer/0  step 0  loss 0",
        "trainer/0  step 5  validation_loss 0.5",
        "stages/1  step 6  loss 0.6",
        "trainer/0  step 4  loss 0.4",
    ]


def test_numbers_have_four_digits() -> None:
    values = [0.0, 3.0, 2.41321, 0.000123456, 11200.4, 999.99, -5.5, math.nan, math.inf, 1e300]
    assert [number(value) for value in values] == [
        *("0", "3", "2.413", "0.0001235", "11200", "1000", "-5.5", "nan", "inf", "1e+300")
    ]
