"""The page's server refuses strangers, reads nothing outside of run folders, and streams what is new."""

import datetime
import ipaddress
import json
import random
import re
import ssl
import string
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import lp_pipe as lp
import lp_pipe.search as ls
from lp_pipe.dashboard.routes import Routes
from lp_pipe.dashboard.server import Certificate, DashboardServer
from lp_pipe.pipeline.schedule import make_schedule
from lp_pipe.pipeline.schedule.prediction import Prediction, planned_costs
from tests.dashboard.fixtures import Browser, metric_line, write_events, write_run

Serve = Callable[..., DashboardServer]


def test_a_pipelines_predicted_step_needs_no_trace(serve: Serve, tmp_path: Path) -> None:
    prediction = Prediction(make_schedule("1f1b", 2, 2), planned_costs([3e-3, 3e-3]), "by the plan")
    write_run(tmp_path / "one", {"stages": 2})
    write_events(tmp_path / "one", {"event": "schedule", "node": "stages/0", **(prediction.facts() or {})})
    write_events(tmp_path / "one", {"event": "schedule", "node": "other/0", "workers": ["nonsense"]})
    found = Browser(serve(tmp_path / "one")).get("/api/timeline", run="one")
    assert [track["track"] for track in found["tracks"]] == ["worker 0", "worker 1"]
    assert found["tracks"][0]["process"].startswith("predicted")
    assert found["tracks"][1]["spans"][:2] == [
        [pytest.approx(1000), pytest.approx(1000), "forward", {"stage": 1, "microbatch": 0}],
        [pytest.approx(2000), pytest.approx(2000), "backward", {"stage": 1, "microbatch": 0}],
    ]


def test_page_shows_a_run_with_the_states_of_its_nodes(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1, "stages": 3})
    write_events(tmp_path / "one", {"event": "death", "node": "stages/1", "how": "SIGKILL"})
    write_events(tmp_path / "one", {"time": 1.0, "event": "start", "node": "trainer/0", "pid": 8})
    write_events(tmp_path / "one", {"time": 9.0, "event": "checkpoint", "node": "trainer/0", "step": 1})
    browser = Browser(serve(tmp_path / "one"))
    listed = browser.get("/api/runs")
    assert [run["key"] for run in listed["runs"]] == ["one"]
    assert listed["runs"][0]["state"] == "running"
    run = browser.get("/api/run", run="one")
    assert run["states"]["stages/1"]["state"] == "failed"
    assert run["states"]["stages/1"]["error"] == "SIGKILL"
    assert run["states"]["stages/2"]["state"] == "running"
    assert (run["states"]["trainer/0"]["pid"], run["states"]["trainer/0"]["since"]) == (8, 1.0)
    assert [len(box["cards"]) for box in run["scene"]["boxes"]] == [1, 3]


def test_run_of_a_killed_launcher_is_dead_and_so_are_its_nodes(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1, "stages": 1}, pid_started=1)
    write_events(tmp_path / "one", {"event": "end", "node": "stages/0", "state": "finished"})
    run = Browser(serve(tmp_path / "one")).get("/api/run", run="one")
    assert run["state"] == "dead"
    assert {name: row["state"] for name, row in run["states"].items()} == {
        "trainer/0": "dead",
        "stages/0": "finished",
    }


def test_groups_above_eight_nodes_are_folded(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1, "eight": 8, "nine": 9})
    scene = Browser(serve(tmp_path / "one")).get("/api/run", run="one")["scene"]
    assert {box["label"]: len(box["cards"]) for box in scene["boxes"]} == {"trainer": 1, "eight": 8, "nine": 1}


def test_strangers_are_refused(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1})
    browser = Browser(serve(tmp_path / "one"))
    known = {"Cookie": browser.cookie}
    paths = ["/", "/api/runs", "/api/stream?run=one", "/nothing"]
    for path in paths:
        assert browser.ask(path)[0] == 401
        assert browser.ask(path, {"Cookie": browser.cookie[:-1]})[0] == 401
        assert browser.ask(f"/?token={'0' * 32}")[0] == 401
        for host in ("evil.example", f"evil.example:{browser.port}", "127.0.0.1", "127.0.0.1:1", ""):
            assert browser.ask(path, {**known, "Host": host})[0] == 403
        for origin in ("http://evil.example", "null", f"https://{browser.host}", "http://127.0.0.1"):
            assert browser.ask(path, {**known, "Origin": origin})[0] == 403
    assert browser.ask("/api/runs", {**known, "Origin": f"http://{browser.host}"})[0] == 200


def test_cookie_and_headers_keep_scripts_and_other_sites_out(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1})
    browser = Browser(serve(tmp_path / "one"))
    assert len(browser.token) == 32
    status, head, _ = browser.ask(f"/?token={browser.token}")
    assert status == 200
    assert "HttpOnly" in head["Set-Cookie"] and "SameSite=Strict" in head["Set-Cookie"]
    assert browser.token not in head["Set-Cookie"]
    policy = head["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert head["X-Content-Type-Options"] == "nosniff"
    assert head["X-Frame-Options"] == "DENY"


def test_read_only_server_refuses_every_action(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1})
    for is_read_only, status in ((True, 403), (False, 404)):
        browser = Browser(serve(tmp_path / "one", is_read_only=is_read_only))
        assert browser.post("/api/experiment", {"id": "none", "action": "kill"})[0] == status
    assert browser.post("/api/experiment", {"id": "none"}, Origin="http://evil.example")[0] == 403
    assert browser.post("/api/experiment", {"id": "none"}, **{"Content-Type": "text/plain"})[0] == 403


@pytest.mark.parametrize("num_paths", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_path_reads_anything_outside_of_the_runs(serve: Serve, tmp_path: Path, num_paths: int) -> None:
    secret = "the secret of another folder"
    (tmp_path / "secret.txt").write_text(secret)
    (tmp_path / "secret.jsonl").write_text(metric_line("n/0", 1, 1.0, {secret: 1.0}))
    folder = tmp_path / "one"
    write_run(folder, {"trainer": 1})
    (folder / "logs" / "trainer-0.log").symlink_to(tmp_path / "secret.txt")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (folder / "hangs.log").symlink_to(tmp_path / "secret.txt")
    (folder / "trace.json").symlink_to(tmp_path / "secret.txt")
    browser = Browser(serve(folder))
    known = {"Cookie": browser.cookie}
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    names = ["secret.txt", str(tmp_path / "secret.txt"), "../secret.txt", "trainer/0", "..", "one", "etc/passwd"]
    steps = ["/", "..", "%2e%2e", "..%2f", "%00", "//", "\\", *names]
    queries = ["log", "hangs", "names", "series", "timeline", "run", "events", "checkpoints", "experiment", "after"]
    for _ in range(num_paths):
        path = "/" + "".join(chance.choice(steps) for _ in range(chance.randrange(1, 7)))
        if chance.random() < 0.5:
            given = {key: chance.choice(names) for key in ("run", "node", "trace", "id")}
            given["run"] = "one" if chance.random() < 0.5 else given["run"]
            given["keys"] = json.dumps([["n/0", secret]])
            path = f"/api/{chance.choice(queries)}?" + "&".join(f"{key}={quote(given[key])}" for key in given)
        elif chance.random() < 0.3:
            path += "".join(chance.choice(string.punctuation.replace("#", "")) for _ in range(10))
        status, _, body = browser.ask(path, known)
        assert status in (200, 400, 404), path
        assert secret not in body.decode(errors="replace").replace(quote(secret), ""), path
        assert b"root:" not in body, path


def test_log_is_read_by_offset_and_tail(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1})
    log = tmp_path / "one" / "logs" / "trainer-0.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    browser = Browser(serve(tmp_path / "one"))
    tail = browser.get("/api/log", run="one", node="trainer/0")
    assert len(tail["lines"]) == 2000
    assert tail["lines"][-1] == "line 99999"
    assert tail["lines"][0] == "line 98000"
    before = browser.get("/api/log", run="one", node="trainer/0", end=tail["start"])
    assert before["lines"][-1] == "line 97999"
    with log.open("a") as file:
        file.write("<b>one more</b>\nunfinished")
    after = browser.get("/api/log", run="one", node="trainer/0", start=tail["end"])
    assert after["lines"] == ["<b>one more</b>"]
    assert browser.get("/api/log", run="one", node="trainer/0", start=after["end"])["lines"] == []


def test_stream_says_what_is_new_and_that_the_launcher_is_dead(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    write_run(folder, {"trainer": 1})
    server = serve(folder)
    is_closing = threading.Event()
    stream = server.routes.stream({"run": "one"}, is_closing)

    def wait_for(kind: str) -> dict[str, object]:
        deadline = time.monotonic() + 10
        for message in stream:
            if message["kind"] == kind:
                return dict(message)
            assert time.monotonic() < deadline
        raise AssertionError(kind)

    assert wait_for("states")["states"]
    assert wait_for("beat")
    (folder / "metrics.jsonl").write_text(metric_line("trainer/0", 1, 1.0, {"loss": 0.5}))
    assert wait_for("metrics")["size"]
    write_events(folder, {"event": "death", "node": "trainer/0", "how": "exit code 1"})
    states = wait_for("states")["states"]
    assert isinstance(states, dict) and states["trainer/0"]["state"] == "failed"
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "pid_started": 1}))
    assert wait_for("run")["state"] == "dead"
    is_closing.set()
    assert list(stream) == []


def test_experiments_are_shown_with_trials_and_curves(serve: Serve, tmp_path: Path) -> None:
    def trial(t: ls.Trial) -> None:
        for step in t.steps():
            t.report({"loss": t.params["lr"] / step})

    program = ls.experiment(
        "small", trial, space={"lr": ls.choice(1.0, 2.0)}, searcher=ls.Grid("loss", 2), folder=tmp_path / "small"
    )
    lp.launch(program, mode="thread").wait(30)
    server = serve(tmp_path / "small")
    browser = Browser(server)
    assert [one["key"] for one in browser.get("/api/experiments")] == ["small"]
    found = browser.get("/api/experiment", id="small")
    assert (found["state"], found["metric"], found["best"]) == ("ended", "loss", 0)
    assert [(one["id"], one["state"], one["best"]) for one in found["trials"]] == [
        (0, "finished", 0.5),
        (1, "finished", 1.0),
    ]
    assert found["trials"][1]["curve"] == [[1, 2.0], [2, 1.0]]
    assert found["trials"][1]["params"] == {"lr": 2.0}
    assert browser.get("/api/experiment", id="small", version=found["version"]) == {"version": found["version"]}
    status, body = browser.post("/api/experiment", {"id": "small", "action": "pause"})
    assert status == 400 and b"small" in body


def test_state_of_a_run_is_told_as_open_metrics(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1, "stages": 1})
    write_events(tmp_path / "one", {"event": "death", "node": "stages/0", "how": "SIGKILL"})
    (tmp_path / "one" / "metrics.jsonl").write_text(metric_line("trainer/0", 1, 1.0, {"loss": 0.25}))
    lines = serve(tmp_path / "one").routes.open_metrics().splitlines()
    assert 'lp_pipe_node_up{node="trainer/0"} 1.0' in lines
    assert 'lp_pipe_node_up{node="stages/0"} 0.0' in lines
    assert 'lp_pipe_metric{name="loss",node="trainer/0"} 0.25' in lines
    assert lines[-1] == "# EOF"


def test_server_sleeps_while_nobody_looks(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1})
    browser = Browser(serve(tmp_path / "one"))
    browser.get("/api/run", run="one")
    thread = next(one for one in threading.enumerate() if one.name.endswith("(serve)"))
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def switches() -> str:
        return next(line for line in status.read_text().splitlines() if line.startswith("voluntary"))

    time.sleep(0.2)
    before = switches()
    time.sleep(1.0)
    assert switches() == before


def test_other_addresses_need_a_certificate(tmp_path: Path) -> None:
    routes = Routes(list, list)
    with pytest.raises(ValueError, match=r"0\.0\.0\.0"):
        DashboardServer(routes, "0.0.0.0")
    cert, key = write_certificate(tmp_path)
    server = DashboardServer(routes, "127.0.0.1", certificate=Certificate(cert, key))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    context = ssl.create_default_context(cafile=str(cert))
    with urllib.request.urlopen(server.gatekeeper.first_url, context=context, timeout=10) as answer:
        assert "Secure" in answer.headers["Set-Cookie"]
    server.close()
    thread.join(10)
    server.server_close()


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(cert.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(private)
    return folder / "cert.pem", folder / "key.pem"


def test_a_browser_asks_for_the_pages_files_once(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"trainer": 1})
    browser = Browser(serve(tmp_path / "one"))
    cookie = {"Cookie": browser.cookie}
    _, head, body = browser.ask("/", cookie)
    assert head["Cache-Control"] == "no-cache"
    paths = re.findall(r'(?:href|src)="(/[^"]+\.(?:js|css))"', body.decode())
    assert len(paths) > 5
    for path in paths:
        status, head, _ = browser.ask(path, cookie)
        assert status == 200 and "immutable" in head["Cache-Control"]
        assert browser.ask(path)[0] == 401
        assert browser.ask(f"/{path.rpartition('/')[2]}", cookie)[0] == 404
    begin = browser.get("/api/begin")
    assert (begin["first"], begin["run"]) == ("one", browser.get("/api/run", run="one"))
