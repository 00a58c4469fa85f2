"""Measure the web page of `lp_pipe ui`: how soon it is drawn, how soon a logged number is, and what it costs.

    python -m benchmarks.page [--points 1000000] [--minute-s 5] [--json FILE]

A folder as a run of 200 nodes leaves it, with a million points of one metric, and an experiment of 64 trials; headless
chromium, which must be installed (`make test-ui` does that). "cold" is a run's first server, which has just been
started; "warm" the second tab; "again" the next server's first tab. "first paint" is the browser's own.

1. open: first paint, and `body[data-ready]` of the graph, the metrics (eight of 200 series) and the experiments.
2. live: from `log_metrics`'s write to the point in the plot, 100 times.
3. idle: voluntary context switches and CPU seconds of the server in ten seconds without a tab.
4. training: calls and steps a second of a small program in process mode, with one tab and without, in turns.
5. growth: memory of the server, and the heap of the page's scripts, while 200 nodes log ten records a second each, and
   a tab looks (--minute-s).
6. zoom: 1 % of a series of a million points: milliseconds and compressed bytes; the tail of a log of a million lines.
7. crowd: the graph of 1,000 nodes in 20 groups; a log of a million lines in a node's panel; with seven hidden tabs,
   from showing the first again until it is live.
"""

import argparse
import gzip
import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any
from urllib.parse import quote

import lp_pipe as lp
import lp_pipe.search as ls
from benchmarks.report import machine, show_table, write_json
from tests.dashboard.chromium import Chromium, Page
from tests.dashboard.fixtures import metric_line, write_run

NODES, TRIALS = 200, 64
KINDS = ("cold", "warm", "again")


class Ui:
    """A server in a process of its own."""

    def __init__(self, target: pathlib.Path) -> None:
        command = [sys.executable, "-m", "lp_pipe", "ui", str(target)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.cookie = ""

    def get(self, path: str) -> tuple[float, bytes]:
        """Return the seconds and the body, as it was sent."""
        host = self.url.split("/")[2]
        connection = http.client.HTTPConnection(host, timeout=60)
        began = time.perf_counter()
        head = {"Accept-Encoding": "gzip"}
        token = self.url.partition("token=")[2]
        connection.request("GET", f"{path}{'&' if '?' in path else '?'}token={token}", headers=head)
        body = connection.getresponse().read()
        took = time.perf_counter() - began
        connection.close()
        return took, body

    @property
    def rss_mb(self) -> float:
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise AssertionError

    @property
    def switches(self) -> int:
        total = 0
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            lines = (task / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
        return total

    @property
    def cpu_s(self) -> float:
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()


def make_folder(folder: pathlib.Path, points: int) -> None:
    write_run(folder, {"trainer": 1, "workers": NODES - 1})
    names = ["trainer/0", *(f"workers/{index}" for index in range(NODES - 1))]
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(points):
            step = number // NODES
            file.write(metric_line(names[number % NODES], step, 1000 + number * 1e-3, {"loss": random.random()}))
    with (folder / "logs" / "trainer-0.log").open("w") as file:
        file.writelines(f"line {number} of a long log of a node\n" for number in range(1_000_000))


def report_losses(trial: ls.Trial) -> None:
    for step in trial.steps():
        trial.report({"loss": trial.params["lr"] / step})


def make_experiment(folder: pathlib.Path) -> None:
    searcher = ls.Random("loss", TRIALS, 16)
    program = ls.experiment(
        "trials", report_losses, space={"lr": ls.log(1e-4, 1.0), "width": ls.choice(64, 128)}, searcher=searcher,
        slots=2, folder=folder / "trials",
    )  # fmt: skip
    lp.launch(program, mode="thread").wait()


def opened(browser: Chromium, url: str) -> tuple[Page, dict[str, float]]:
    """Open the first page in an empty tab, and the others; return milliseconds by name."""
    found: dict[str, float] = {}
    page = browser.page("about:blank")
    began = time.perf_counter()
    page.open(url)
    page.ready("graph", 60)
    found["graph ready"] = 1e3 * (time.perf_counter() - began)
    found["first paint"] = page.js("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    for name in ("metrics", "experiments"):
        began = time.perf_counter()
        page.go(name, 120)
        found[f"{name} ready"] = 1e3 * (time.perf_counter() - began)
    found["all ready"] = sum(took for name, took in found.items() if name.endswith("ready"))
    return page, found


def open_times(browser: Chromium, folder: pathlib.Path) -> dict[str, Any]:
    rows = []
    for _ in range(3):
        (folder / "metrics.index").unlink(missing_ok=True)
        row = []
        for num_tabs in (2, 1):
            ui = Ui(folder)
            row += [opened(browser, ui.url)[1] for _ in range(num_tabs)]
            browser.close_pages()
            ui.close()
        rows.append(row)
    return {
        name: {kind: statistics.median(row[place][name] for row in rows) for place, kind in enumerate(KINDS)}
        for name in rows[0][0]
    }


def live_delays(browser: Chromium, folder: pathlib.Path, count: int = 100) -> list[float]:
    run = folder / "live"
    write_run(run, {"trainer": 1})
    path = run / "metrics.jsonl"
    path.write_text(metric_line("trainer/0", 0, 1.0, {"loss": 1.0}))
    ui = Ui(run)
    page = browser.page(ui.url)
    page.ready("graph")
    page.go("metrics", 120)
    late = []
    for step in range(1, count + 1):
        time.sleep(random.random() / 4)
        began = time.perf_counter()
        with path.open("a") as file:
            file.write(metric_line("trainer/0", step, 1.0 + step, {"loss": 1 / step}))
        page.js(
            "new Promise(done => { const look = () => document.querySelector('[data-metric=loss]').dataset.points === "
            f"'{step + 1}' ? requestAnimationFrame(done) : setTimeout(look, 5); look(); }})"
        )
        late.append(time.perf_counter() - began)
    browser.close_pages()
    ui.close()
    return late


def idle_cost(browser: Chromium, folder: pathlib.Path) -> dict[str, float]:
    ui = Ui(folder)
    page = browser.page(ui.url)
    page.ready("graph", 60)
    page.go("metrics", 120)
    browser.close_pages()
    time.sleep(3)
    switches, cpu_s = ui.switches, ui.cpu_s
    time.sleep(10)
    found = {"wake-ups": ui.switches - switches, "cpu_ms": 1e3 * (ui.cpu_s - cpu_s)}
    ui.close()
    return found


class Adder:
    def add(self, one: int) -> int:
        return one + 1


def call(server: Any, seconds: float) -> None:
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        server.add(count)
        count += 1
        if count % 100 == 0:
            lp.log_metrics({"count": count}, step=count)
    lp.log_metrics({"calls": count})
    lp.stop()


def calls_per_s(folder: pathlib.Path, browser: Chromium | None, seconds: float = 6.0) -> float:
    program = lp.Program("calls")
    server = program.add_node(lp.CourierNode(Adder), label="server")
    program.add_node(lp.PyNode(call, server, seconds), label="caller")
    run = lp.launch(program, mode="process", run_dir=folder)
    ui = None
    if browser is not None:
        ui = Ui(folder)
        page = browser.page(ui.url)
        page.ready("graph", 60)
        page.go("metrics", 120)
    run.wait()
    if ui is not None and browser is not None:
        browser.close_pages()
        ui.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(next(line["values"]["calls"] for line in lines if "calls" in line["values"])) / seconds


def growth(browser: Chromium, folder: pathlib.Path, minute_s: float) -> dict[str, list[float]]:
    """Return the megabytes after each minute of an hour, whose records are written in `minute_s` each."""
    run = folder / "growing"
    write_run(run, {"workers": NODES})
    ui = Ui(run)
    page = browser.page(ui.url)
    page.ready("graph")
    page.go("metrics", 120)
    sizes: dict[str, list[float]] = {"server": [], "page": []}
    with (run / "metrics.jsonl").open("a") as file:
        for minute in range(60):
            began = time.monotonic()
            for step in range(600 * minute, 600 * (minute + 1)):
                for node in range(NODES):
                    file.write(metric_line(f"workers/{node}", step, 1000 + step * 0.1, {"loss": random.random()}))
            file.flush()
            time.sleep(max(0.5, minute_s - (time.monotonic() - began)))
            ui.get("/api/names?run=growing")  # returns once the minute's records are read
            sizes["server"].append(ui.rss_mb)
            page.ask("HeapProfiler.collectGarbage")
            sizes["page"].append(page.ask("Runtime.getHeapUsage")["usedSize"] / 1e6)
    browser.close_pages()
    ui.close()
    return sizes


def queries(folder: pathlib.Path) -> dict[str, Any]:
    run = folder / "one_series"
    write_run(run, {"trainer": 1})
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(
            metric_line("trainer/0", step, 1000 + step * 0.1, {"loss": random.random()}) for step in range(1_000_000)
        )
    (run / "logs" / "trainer-0.log").write_text("".join(f"line {number}\n" for number in range(1_000_000)))
    ui = Ui(run)
    ui.get("/api/names?run=one_series")
    keys = quote(json.dumps([["trainer/0", "loss"]]))
    took, sizes = [], []
    for _ in range(50):
        low = random.randrange(990_000)
        seconds, body = ui.get(f"/api/series?run=one_series&keys={keys}&low={low}&high={low + 10_000}&buckets=550")
        took.append(1e3 * seconds)
        sizes.append(len(body))
        assert len(json.loads(gzip.decompress(body))["series"][0]["x"]) > 500
    tails = [1e3 * ui.get("/api/log?run=one_series&node=trainer/0")[0] for _ in range(10)]
    ui.close()
    return {"zoom_ms": statistics.median(took), "zoom_bytes": statistics.median(sizes), "tail_ms": max(tails)}


def crowd(browser: Chromium, folder: pathlib.Path) -> dict[str, float]:
    """Return milliseconds and sizes of what has many nodes, lines or tabs."""
    found: dict[str, float] = {}
    run = folder / "crowd"
    write_run(run, {f"group{number}": 50 for number in range(20)})
    with (run / "logs" / "group0-0.log").open("w") as file:
        file.writelines(f"line {number} of a long log of a node\n" for number in range(1_000_000))
    ui = Ui(run)
    browser.page(ui.url).ready("graph", 60)
    page = browser.page("about:blank")
    began = time.perf_counter()
    page.open(ui.url)
    page.ready("graph", 60)
    found["1,000 nodes, ms"] = 1e3 * (time.perf_counter() - began)
    found["1,000 nodes, SVG elements"] = page.js("document.querySelectorAll('svg.program *').length")
    page.js("document.querySelector('[data-node~=\"group0/0\"]').dispatchEvent(new MouseEvent('click'))")
    page.wait("document.querySelector('#panel .member')")
    began = time.perf_counter()
    page.js("document.querySelector('#panel .member').click()")
    page.wait("document.querySelector('#panel pre.tail')?.textContent.includes('line 999999')")
    found["log, ms"] = 1e3 * (time.perf_counter() - began)
    found["log, lines"] = page.js("document.querySelector('#panel pre.tail').textContent.split('\\n').length")
    while len(browser.pages) < 8:
        browser.pages[-1].set_hidden(True)
        browser.page(ui.url).ready("graph", 60)
    browser.pages[-1].set_hidden(True)
    began = time.perf_counter()
    browser.pages[0].set_hidden(False)
    browser.pages[0].wait("document.getElementById('link').innerText.includes('live')")
    found["8 tabs, ms"] = 1e3 * (time.perf_counter() - began)
    browser.close_pages()
    ui.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument(
        "--minute-s", type=float, default=0.0, help="seconds for each minute of growth; 0: leave it out"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    browser = Chromium()
    results: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_folder(folder / "large", options.points)
        make_experiment(folder / "large")
        results["open"] = open_times(browser, folder / "large")
        late = sorted(live_delays(browser, folder))
        results["live_s"] = {"median": late[len(late) // 2], "p99": late[-2], "max": late[-1]}
        results["idle"] = idle_cost(browser, folder / "large")
        pairs = [
            (calls_per_s(folder / f"without{n}", None), calls_per_s(folder / f"with{n}", browser)) for n in range(3)
        ]
        results["calls_per_s"] = pairs
        results["queries"] = queries(folder)
        results["crowd"] = crowd(browser, folder)
        if options.minute_s:
            sizes = results["growth_mb"] = growth(browser, folder, options.minute_s)
            results["grown_mb"] = {kind: max(found) - found[0] for kind, found in sizes.items()}
    results["machine_after"] = machine()
    browser.close()
    shown, load = results["open"], results["machine"]["load_average"]
    show_table(
        f"200 nodes, {options.points:,} points, 64 trials; milliseconds (load {load:.1f})",
        ("", *KINDS),
        [(name, *(f"{row[kind]:.0f}" for kind in KINDS)) for name, row in shown.items()],
    )
    rest = {name: found for name, found in results.items() if name not in ("open", "machine", "machine_after")}
    print(json.dumps(rest, indent=1), f"load afterwards {results['machine_after']['load_average']:.1f}", sep="\n")
    if options.json:
        write_json(results, options.json)


if __name__ == "__main__":
    main()
