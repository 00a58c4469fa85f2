"""Spans of a traced run as OpenTelemetry's, exported from the launcher. Needs the extra `otel`."""

import logging
import threading
import time
from typing import Any

from lp_pipe.telemetry.tracing import STEP, TraceBatch

_log = logging.getLogger(__name__)
_LAST_SPANS_S = 5.0
_CATEGORIES = ("call", "handler", STEP)


class OpenTelemetryExporter:
    """Exports calls, handlers and steps. Each is a root span: which call a handler serves is not known here.

    provider: an SDK's TracerProvider; None: the global one if the script has set one, else a new one that exports as
        the variables OTEL_EXPORTER_OTLP_… say.

    Raises:
        ImportError: the packages of the extra `otel` are not installed.
    """

    def __init__(self, program: str, provider: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError as error:
            raise ImportError("otel=True needs OpenTelemetry: pip install 'lp_pipe[otel]'") from error
        found = provider if provider is not None else trace.get_tracer_provider()
        self._own = None
        if not isinstance(found, TracerProvider):
            found = self._own = _new_provider(program)
        self._provider = found
        self._tracer = found.get_tracer("lp_pipe")
        kind = trace.SpanKind
        self._kinds = {"call": kind.CLIENT, "handler": kind.SERVER, STEP: kind.INTERNAL}
        self._epoch_s = time.time() - time.monotonic()

    def add(self, node: str, batch: TraceBatch, offset_s: float = 0.0) -> None:
        """Export the spans of a node. offset_s: what to add to its host's clock."""
        for span in batch.spans:
            if span.category not in _CATEGORIES:
                continue
            start, end = (round((one + offset_s + self._epoch_s) * 1e9) for one in (span.start, span.end))
            name = f"{node}.{span.name}" if span.category == "handler" else span.name
            attributes = {"lp_pipe.node": node, **{f"lp_pipe.{key}": value for key, value in span.args.items()}}
            exported = self._tracer.start_span(
                name, kind=self._kinds[span.category], start_time=start, attributes=attributes
            )
            exported.end(end)

    def close(self) -> None:
        """Export what is left; takes 5 s at most, also if the collector does not answer."""
        thread = threading.Thread(target=self._finish, name="OpenTelemetry's last spans", daemon=True)
        thread.start()
        thread.join(_LAST_SPANS_S)
        if thread.is_alive():
            _log.warning("OpenTelemetry: the last spans were not exported within %.0f s and are lost", _LAST_SPANS_S)

    def _finish(self) -> None:
        self._provider.force_flush(round(1000 * _LAST_SPANS_S))
        if self._own is not None:
            self._own.shutdown()


def _new_provider(program: str) -> Any:
    """
    Raises:
        ImportError: there is no exporter for OTLP.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ImportError("otel=True needs an exporter: pip install 'lp_pipe[otel]'") from error
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The variables of the user come first; without any, `create` names the service "unknown_service".
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": program}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `close` does, with a limit
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
