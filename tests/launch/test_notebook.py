"""In a notebook a program shows its graph, and a run its nodes' states until it ends."""

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.graph import GraphView, to_svg
from lp_pipe.launch import run as run_module

WITHIN_S = 30


def test_a_program_shows_its_graph() -> None:
    program = lp.Program("demo")
    program.add_node(lp.PyNode(print), label="trainer")
    assert program._repr_svg_() == to_svg(GraphView.of(program))
    elsewhere = lp.Program("other").add_node(lp.CourierNode(dict), label="server")
    program.add_node(lp.PyNode(print, elsewhere), label="invalid")
    assert program._repr_svg_() is None


def test_a_run_shows_its_states_until_it_ends(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    shown: list[str] = []
    has_ended = threading.Event()

    class Display:
        def update(self, page: str) -> None:
            shown.append(page)
            if "has ended" in page:
                has_ended.set()

    def display(page: str, display_id: bool) -> Display:
        shown.append(page)
        return Display()

    module: Any = ModuleType("IPython.display")
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(run_module, "_SHOWN_EVERY_S", 0.02)
    program = lp.Program("<demo>")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="trainer")
    with lp.launch(program, "thread") as run:
        assert "running" in run._repr_html_() and "&lt;demo&gt;" in run._repr_html_()
        run._ipython_display_()
    assert has_ended.wait(WITHIN_S)
    assert "trainer/0" in shown[0] and "runs" in shown[0]
    assert "stopped" in shown[-1] and "has ended" in shown[-1]
