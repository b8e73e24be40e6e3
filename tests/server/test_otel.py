"""Traces: the client's context goes on, a span for each phase, the GenAI names, and no text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.config import ConfigError, ServerConfig, parse_settings
from tests.support.http_server import TextEngine, house, in_loop

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from server.otel import Tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    made = InMemorySpanExporter()
    yield made
    made.shutdown()


def split(spans: tuple[ReadableSpan, ...]) -> tuple[ReadableSpan, list[ReadableSpan]]:
    (server,) = [span for span in spans if span.kind is SpanKind.SERVER]
    return server, [span for span in spans if span is not server]


@in_loop
async def test_span_continues_the_clients_trace_with_a_child_for_each_phase(
    exporter: InMemorySpanExporter,
) -> None:
    tracing = Tracing(SimpleSpanProcessor(exporter))
    engine = TextEngine({"private": "Hello"})
    async with house(engine, ServerConfig(), tracing=tracing) as server:
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        body = {"messages": [{"role": "user", "content": "private words"}], "stream": True}
        answer = await server.client.post("/v1/chat/completions", json=body, headers=headers)
        await server.client.get("/v1/models")
    spans = exporter.get_finished_spans()
    span, phases = split(spans)
    assert span.context.trace_id == int(TRACE_ID, 16)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "scripted"
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["paceline.request.id"] == "mine"
    assert [phase.name for phase in phases] == [
        "parse",
        "tokenize",
        "queue",
        "prefill",
        "first_sample",
        "write",
        "decode",
        "close",
    ]
    assert all(p.parent and p.parent.span_id == span.context.span_id for p in phases)
    assert span.start_time is not None
    assert span.end_time is not None
    total = sum((p.end_time or 0) - (p.start_time or 0) for p in phases)
    assert total == pytest.approx(span.end_time - span.start_time, abs=2e6)
    for one in spans:
        assert "private" not in one.to_json()
        assert "Hello" not in one.to_json()


@in_loop
async def test_refusal_has_a_span_and_a_broken_parent_is_ignored(
    exporter: InMemorySpanExporter,
) -> None:
    tracing = Tracing(SimpleSpanProcessor(exporter))
    async with house(tracing=tracing) as server:
        headers = {"traceparent": b"00-nonsense\xff"}
        await server.client.post("/v1/completions", json={"prompt": ""}, headers=headers)
        answer = await server.complete("x", max_tokens=1)
    refused, answered = exporter.get_finished_spans()[0], split(exporter.get_finished_spans()[1:])
    assert (refused.attributes or {})["http.response.status_code"] == 400
    assert refused.parent is None
    assert refused.status.status_code is StatusCode.UNSET
    assert answer.headers["traceparent"].split("-")[1] == (f"{answered[0].context.trace_id:032x}")


def test_otel_without_its_packages_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_settings(["--otel"], {}).server.otel
    monkeypatch.setattr("server.config.OTEL_PACKAGES", ("opentelemetry.no_such_part", "nothing.x"))
    with pytest.raises(ConfigError, match="paceline\\[otel\\]"):
        parse_settings(["--otel"], {})
