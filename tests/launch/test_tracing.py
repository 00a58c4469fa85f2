"""A traced run has the calls of all its nodes in one file; an untraced one pays nothing."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch.tracing import Tracer
from lp_pipe.telemetry import tracing, waits
from tests.launch.test_trace_file import check_format, events_of

pytestmark = pytest.mark.usefixtures("warm_bare_template")

WITHIN_S = 30


class Server:
    def add(self, value: int) -> int:
        return value + 1


def call(server: Any, until: Any = None) -> None:
    for value in range(5):
        server.add(value)
    lp.stop()


def test_a_trace_has_calls_and_their_handlers_at_the_same_time(mode: str, tmp_path: Path) -> None:
    program = lp.Program("demo")
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(call, server), label="user")
    lp.launch(program, mode, run_dir=tmp_path, trace=True).wait(WITHIN_S)
    events = check_format(tmp_path / "trace.json")
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert {"server/0", "user/0"} <= set(names.values())
    spans = [one for one in events if one["ph"] == "X"]
    calls = [one for one in spans if one["name"] == "server/0.add"]
    handlers = [one for one in spans if one["name"] == "add" and one["cat"] == "handler"]
    assert {names[one["pid"]] for one in calls} == {"user/0"} and {names[one["pid"]] for one in handlers} == {
        "server/0"
    }
    assert len(calls) == len(handlers) == 5
    for caller, handler in zip(calls, sorted(handlers, key=lambda one: one["ts"]), strict=True):
        assert caller["ts"] <= handler["ts"] and handler["ts"] + handler["dur"] <= caller["ts"] + caller["dur"]
    assert tracing.recorder is None and waits.waiting.__exit__ is waits._plain_exit


def test_a_live_run_is_traced_for_a_while_and_not_twice_at_a_time(tmp_path: Path) -> None:
    program = lp.Program("demo")
    go = threading.Event()

    def work(server: Any) -> None:
        go.wait(WITHIN_S)
        call(server)

    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(work, server), label="user")
    with lp.launch(program, "thread", run_dir=tmp_path) as run:
        tracer: Tracer = run._tracer
        tracer.begin(tmp_path / "first.json")
        with pytest.raises(lp.LpPipeError, match=r"second\.json"):
            tracer.begin(tmp_path / "second.json")
        tracer.end()
        tracer.begin(tmp_path / "second.json")
        go.set()
        run.wait(WITHIN_S)
    assert not [one for one in events_of(tmp_path / "first.json") if one.get("cat") == "call"]
    assert [one for one in events_of(tmp_path / "second.json") if one.get("cat") == "call"]


def test_calls_and_handlers_are_exported_beside_a_trace(mode: str, tmp_path: Path) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exported = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    program = lp.Program("demo")
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(call, server), label="user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
        lp.launch(program, mode, run_dir=tmp_path, otel=True, trace=True).wait(WITHIN_S)
    found = [(one.name, one.kind.name, one.attributes["lp_pipe.node"]) for one in exported.get_finished_spans()]
    calls = [("server/0.add", "CLIENT", "user/0"), ("server/0.add", "SERVER", "server/0")]
    assert sorted(found) == sorted(calls * 5)
    assert [one for one in events_of(tmp_path / "trace.json") if one.get("cat") == "call"]
    assert tracing.recorder is None


def test_a_collector_gets_spans_by_the_usual_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    requests: list[tuple[str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.headers["x-key"], ExportTraceServiceRequest.FromString(body)))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    program = lp.Program("demo")
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(call, server), label="user")
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
        lp.launch(program, "thread", otel=True).wait(WITHIN_S)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        lp.launch(program, "thread", otel=True).wait(WITHIN_S)
        collector.shutdown()
    assert [key for key, _ in requests] == ["secret"] * len(requests)
    by_service: dict[str, list[Any]] = {}
    for resource in (one for _, request in requests for one in request.resource_spans):
        (service,) = [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"]
        by_service.setdefault(service, []).extend(span for scope in resource.scope_spans for span in scope.spans)
    assert set(by_service) == {"demo", "mine"}
    for spans in by_service.values():
        assert sorted(span.name for span in spans) == ["server/0.add"] * 10
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
