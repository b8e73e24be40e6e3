"""OpenTelemetry traces of generating requests: one span each, and below it one for each phase.

Owns the names: the GenAI conventions for the request, our phases for its children. Spans go where
the OTEL_* variables say. Imported only where --otel asks for it; needs the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.timeline import RequestTimeline

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
_PROPAGATED = (b"traceparent", b"tracestate")


class RequestSpan:
    """The span of one HTTP request, from its first byte on."""

    def __init__(self, span: Span, tracer: trace.Tracer, offset: int) -> None:
        self._span = span
        self._tracer = tracer
        self._offset = offset

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What tells the client which trace it is part of."""
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(self._span))
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    def end(self, status: int, timeline: RequestTimeline | None, model: str, now: float) -> None:
        span = self._span
        span.set_attribute("http.response.status_code", status)
        if status >= 500 or status == 0:
            span.set_status(StatusCode.ERROR)
        if timeline is not None:
            self._describe(timeline, model, now)
        span.end(_wall(now, self._offset))

    def _describe(self, timeline: RequestTimeline, model: str, now: float) -> None:
        reasons = [sequence.finish_reason or "unknown" for sequence in timeline.sequences]
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.response.id": timeline.answer_id,
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.usage.input_tokens": timeline.num_prompt,
                "gen_ai.usage.output_tokens": timeline.num_tokens,
                "gen_ai.usage.cache_read.input_tokens": timeline.num_cached,
                "paceline.request.id": timeline.id,
                "paceline.preemptions": timeline.num_preemptions,
            }
        )
        if timeline.ttft_seconds is not None:
            self._span.set_attribute("gen_ai.server.time_to_first_token", timeline.ttft_seconds)
        if "error" in reasons:
            self._span.set_status(StatusCode.ERROR)
        context = trace.set_span_in_context(self._span)
        for phase in timeline.phases(now):
            began, ended = (_wall(at, self._offset) for at in (phase.began, phase.ended))
            self._tracer.start_span(phase.name, context, start_time=began).end(ended)


class Tracing:
    """One a server; `processor` replaces the exporter in tests."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        resource = Resource.create({SERVICE_NAME: "paceline"})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("paceline")

    def begin(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], received: float
    ) -> RequestSpan | None:
        """None where nothing is generated. Continues the client's trace if it names one."""
        operation = OPERATIONS.get(path)
        if operation is None:
            return None
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in headers if name in _PROPAGATED
        }
        offset = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            operation,
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "paceline",
                "url.path": path,
            },
            start_time=_wall(received, offset),
        )
        return RequestSpan(span, self._tracer, offset)

    def close(self) -> None:
        self._provider.shutdown()


def _wall(instant: float, offset: int) -> int:
    """Nanoseconds of the wall clock, which is what traces of many machines have in common.

    One `offset` a request: the clock may be set meanwhile, and phases must stay side by side.
    """
    return round(instant * 1e9) + offset
