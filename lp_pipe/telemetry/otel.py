"""Spans of a traced run as OpenTelemetry's, exported from the launcher. Needs the extra `otel`."""

import time
from typing import Any

from lp_pipe.telemetry.tracing import STEP, TraceBatch

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
        """Export what is left; takes 5 s at most."""
        self._provider.force_flush(5000)
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

    provider = TracerProvider(resource=Resource.create({"service.name": program}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
