"""The page in a browser: every part is drawn, follows the run, and runs nothing that a program has printed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lp_pipe.dashboard.server import DashboardServer
from tests.dashboard.chromium import PROGRAM, Chromium, Page
from tests.dashboard.fixtures import metric_line, write_events, write_run

pytestmark = [
    pytest.mark.ui,
    pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed: make test-ui installs it"),
]

Serve = Callable[..., DashboardServer]
PAGES = ("graph", "metrics", "pipeline", "hangs", "experiments", "runs", "checkpoints")
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    browser = Chromium()
    yield browser
    browser.close()  # also the pages of a test whose server is gone


@pytest.fixture
def browser(chromium: Chromium) -> Iterator[Chromium]:
    """The browser; a script's error or a blocked resource fails the test."""
    chromium.errors.clear()
    yield chromium
    chromium.close_pages()
    assert chromium.errors == []


def click(page: Page, selector: str) -> None:
    page.js(f"document.querySelector({json.dumps(selector)}).dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def write_metrics(folder: Path, steps: range, node: str = "trainer/0", name: str = "loss") -> None:
    append(
        folder / "metrics.jsonl",
        "".join(metric_line(node, step, 1000.0 + step, {name: 1 / (1 + step)}) for step in steps),
    )


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_every_page_is_drawn(serve: Serve, tmp_path: Path, browser: Chromium, width: int, is_dark: bool) -> None:
    folder = tmp_path / "one"
    write_run(folder, {"trainer": 1, "stages": 4, "actors": 12})
    write_events(folder, {"event": "hang", "node": "trainer/0", "nodes": ["trainer/0"], "text": "waits for stages/0"})
    write_metrics(folder, range(500))
    write_trace(folder)
    page = browser.page(serve(folder).gatekeeper.first_url, width, is_dark=is_dark)
    page.ready("graph")
    for name in PAGES:
        page.go(name)
        assert page.js("document.documentElement.scrollWidth <= window.innerWidth"), name
    assert page.js("location.search") == ""
    page.go("graph")
    assert page.js("document.querySelectorAll('svg.program [data-node]').length") == 6
    assert page.js("document.querySelector('[data-node=\"stages/2\"]').dataset.state") == "running"
    page.go("metrics")
    assert page.js("document.querySelector('[data-metric=loss]').dataset.points") == "500"
    assert page.js("document.querySelector('[data-metric=loss] canvas').width") > 100
    page.go("pipeline")
    assert page.js("document.querySelectorAll('canvas.timeline').length") == 2
    assert page.js("document.querySelector('main select option:checked').textContent") == "step 4"
    shown = page.js("document.body.innerText")  # step 5 is not counted
    assert shown.count("25 % idle") == 2 and shown.count("4.0 ms") == 2
    page.go("hangs")
    assert "waits for stages/0" in page.js("document.body.innerText")


def write_trace(folder: Path) -> None:
    events = []
    for pid, name in ((1, "stages/0"), (2, "predicted stages/0")):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        kinds = ((0, "forward"), (1000, "forward"), (3000, "backward"), (9000, "forward"))
        for start, kind in kinds:
            span = {
                "ph": "X",
                "pid": pid,
                "tid": 1,
                "ts": start,
                "dur": 1000,
                "name": kind,
                "args": {"microbatch": 0, "step": 4 if start < 9000 else 5},
            }
            events.append(span)
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))


def test_what_a_program_prints_and_names_stays_text(serve: Serve, tmp_path: Path, browser: Chromium) -> None:
    folder = tmp_path / "one"
    write_run(folder, {HOSTILE: 1, "other": 9}, program=HOSTILE, failure=HOSTILE, ended=time.time(), outcome="failed")
    node = f"{HOSTILE}/0"
    (folder / "logs" / "x-0.log").write_text(f"{HOSTILE}\n")
    (folder / "logs.json").write_text(json.dumps({"x-0.log": node}))
    write_events(folder, {"event": "hang", "node": node, "nodes": [node], "text": HOSTILE})
    write_events(folder, {"event": "death", "node": node, "how": HOSTILE})
    write_metrics(folder, range(20), node, HOSTILE)
    page = browser.page(serve(folder).gatekeeper.first_url)
    page.ready("graph")
    click(page, "[data-node]")
    page.wait("document.querySelector('#panel pre.tail').textContent.includes('onerror')")
    page.wait("document.querySelector('#panel figure canvas')")
    (folder / "failure.txt").write_text(f"Traceback of {HOSTILE}")
    click(page, "#banner summary")
    page.wait("document.querySelector('#banner pre').textContent.includes('Traceback of <img')")
    for name in PAGES:
        page.go(name)
    assert page.js("window.hacked") is None
    assert page.js("document.querySelectorAll('main img, main script, header img').length") == 0


def test_states_logs_and_points_appear_while_the_page_is_open(serve: Serve, tmp_path: Path, browser: Chromium) -> None:
    folder = tmp_path / "one"
    write_run(folder, {"trainer": 1, "stages": 2})
    write_metrics(folder, range(10))
    (folder / "logs" / "trainer-0.log").write_text("begun\n")
    page = browser.page(serve(folder).gatekeeper.first_url)
    page.ready("graph")
    write_events(folder, {"event": "death", "node": "stages/1", "how": "SIGKILL"})
    page.wait("document.querySelector('[data-node=\"stages/1\"]').dataset.state === 'failed'", 2)
    click(page, '[data-node="trainer/0"]')
    page.wait("document.querySelector('#panel pre.tail').textContent === 'begun'")
    append(folder / "logs" / "trainer-0.log", "going on\n")
    page.wait("document.querySelector('#panel pre.tail').textContent === 'begun\\ngoing on'", 2)
    page.go("metrics")
    late = []
    for step in range(10, 30):
        began = time.monotonic()
        write_metrics(folder, range(step, step + 1))
        page.wait(f"document.querySelector('[data-metric=loss]').dataset.points === '{step + 1}'", 3)
        late.append(time.monotonic() - began)
    print(f"from the file to the plot: median {sorted(late)[10]:.3f} s, most {max(late):.3f} s")
    assert sorted(late)[10] < 1.0
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "pid_started": 1}))
    page.wait("document.getElementById('banner').innerText.includes('dead')", 3)
    page.go("graph")
    assert page.js("document.querySelector('[data-node=\"trainer/0\"]').dataset.state") == "dead"


def test_lost_server_is_said_and_its_successor_found(tmp_path: Path, chromium: Chromium) -> None:
    folder = tmp_path / "one"
    write_run(folder, {"trainer": 1})
    write_metrics(folder, range(10))
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}

    def start(port: str) -> tuple["subprocess.Popen[str]", str]:
        command = [sys.executable, "-m", "lp_pipe", "ui", str(folder), f"--port={port}"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert server.stdout is not None
        return server, server.stdout.readline().strip()

    first, url = start("0")
    port = url.rpartition(":")[2].partition("/")[0]
    first.kill()
    first.communicate()
    first, url = start(port)
    page = chromium.page(url)
    page.ready("graph")
    page.go("metrics")
    first.kill()
    first.communicate()
    page.wait("document.getElementById('link').innerText.includes('disconnected since')", 2)
    write_metrics(folder, range(10, 15))
    second, _ = start(port)
    page.wait("document.getElementById('link').innerText.includes('live')", 5)
    page.wait("document.querySelector('[data-metric=loss]').dataset.points === '15'", 3)
    write_metrics(folder, range(15, 20))
    page.wait("document.querySelector('[data-metric=loss]').dataset.points === '20'", 3)
    assert drawn(page) == list(range(20))
    chromium.close_pages()
    second.kill()
    second.communicate()


def drawn(page: Page) -> list[int]:
    found: list[int] = page.js("document.querySelector('[data-metric=loss]').chart.plot.data[0]")
    return found


def test_hidden_tabs_close_their_streams(serve: Serve, tmp_path: Path, browser: Chromium) -> None:
    folder = tmp_path / "one"
    write_run(folder, {"trainer": 1})
    write_metrics(folder, range(5))
    url = serve(folder).gatekeeper.first_url
    pages = []
    for _ in range(8):
        if pages:
            pages[-1].set_hidden(True)
        pages.append(browser.page(url))
        pages[-1].ready("graph")
    pages[-1].wait("document.getElementById('link').innerText.includes('live')", 1)
    pages[-1].set_hidden(True)
    pages[0].set_hidden(False)
    pages[0].wait("document.getElementById('link').innerText.includes('live')", 1)


def test_a_thousand_nodes_are_few_elements(serve: Serve, tmp_path: Path, browser: Chromium) -> None:
    folder = tmp_path / "one"
    write_run(folder, {f"group{number}": 50 for number in range(20)})
    page = browser.page(serve(folder).gatekeeper.first_url)
    page.ready("graph")
    assert page.js("document.querySelectorAll('svg.program *').length") <= 400
    assert page.js("document.querySelector('[data-node~=\"group3/7\"]').dataset.state") == "running"
    click(page, '[data-node~="group3/7"]')
    page.wait("document.querySelectorAll('#panel [data-node]').length === 50")


def test_zoom_shows_points_that_a_bucket_had_merged(serve: Serve, tmp_path: Path, browser: Chromium) -> None:
    folder = tmp_path / "one"
    write_run(folder, {"trainer": 1})
    write_metrics(folder, range(20_000))
    page = browser.page(serve(folder).gatekeeper.first_url)
    page.ready("graph")
    page.go("metrics")
    assert len(drawn(page)) <= 2000
    page.js("document.querySelector('[data-metric=loss]').chart.zoom([5000, 5100])")
    assert [step for step in drawn(page) if 5000 <= step <= 5100] == list(range(5000, 5101))
