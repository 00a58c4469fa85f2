"""`lp_pipe plot` draws what a run has logged, with the steps after a return to a checkpoint once."""

import json
from pathlib import Path

import pytest

from lp_pipe.cli.main import main
from lp_pipe.cli.plot import charts_of_run

LINES = [
    {"time": 1, "node": "a/0", "step": 0, "values": {"loss": 3.0, "lr": 0.1}},
    {"time": 1, "node": "a/0", "step": 1, "values": {"loss": 2.0}},
    {"time": 1, "node": "a/0", "step": 2, "values": {"loss": 99.0}},
    {"time": 2, "node": "b/0", "step": None, "values": {"loss": "nan"}},
    {"time": 2, "node": "b/0", "step": None, "values": {"loss": 5}},
    {"time": 3, "node": "a/0", "event": "resumed", "step": 1},
    {"time": 4, "node": "a/0", "step": 1, "values": {"loss": 1.5}},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (tmp_path / "metrics.jsonl").write_text(text + '{"time": 5, "node": "a/0", "st')
    return tmp_path


def test_a_chart_has_a_curve_for_each_node(run: Path) -> None:
    loss, lr = charts_of_run(run)
    assert (loss.title, lr.title) == ("loss", "lr")
    first, second = loss.curves
    assert (first.name, first.points) == ("a/0", [(0.0, 3.0), (1.0, 1.5)])
    assert (second.name, second.points[1]) == ("b/0", (1.0, 5.0))


def test_chosen_metrics_are_printed_or_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(run), "loss"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("loss\n") and "lr\n" not in printed
    assert main(["plot", str(run), "-o", str(run / "curves.svg")]) == 0
    assert ">loss</text>" in (run / "curves.svg").read_text()


def test_what_cannot_be_drawn_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(run), "los"]) == 2
    assert "'los'" in (said := capsys.readouterr().err) and "'loss'" in said
    assert main(["plot", str(run), "-o", "curves.pdf"]) == 2
    (run / "metrics.jsonl").unlink()
    assert main(["plot", str(run)]) == 2


def test_a_png_needs_matplotlib(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import matplotlib  # noqa: F401  # the error is only there without it
    except ImportError:
        assert main(["plot", str(run), "-o", str(run / "curves.png")]) == 3
        assert "pip install matplotlib" in capsys.readouterr().err
    else:
        assert main(["plot", str(run), "-o", str(run / "curves.png")]) == 0
        assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
