"""What one request cost: an exchange with the server turned into TTFT, gaps and counts.

It owns the definitions of the per-request times and the names of the failures. It must not know how
requests are scheduled or summed up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.http_stream import Exchange, RequestFailed
from bench.sse import events


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request; all times in seconds, `error` None when it went well.

    sent_at: when it was written to the socket, from the start of the run. lag_seconds: how much
    later that was than it was due (the client's own delay). ttft_seconds: sent to the first chunk
    that carries output. e2e_seconds: sent to the last event. gaps: between output chunks.
    counted_by: "usage" if the server reported output_tokens, "chunks" if they were only counted.
    """

    sent_at: float
    lag_seconds: float
    e2e_seconds: float
    ttft_seconds: float | None = None
    gaps: tuple[float, ...] = ()
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    num_chunks: int = 0
    counted_by: str = "chunks"
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""
    retry_after_seconds: float | None = None

    @property
    def tpot_seconds(self) -> float | None:
        """(e2e - TTFT) / (n - 1), for n > 1."""
        if self.ttft_seconds is None or self.output_tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (self.output_tokens - 1)

    @property
    def normalised_seconds(self) -> float | None:
        """e2e / n."""
        return self.e2e_seconds / self.output_tokens if self.output_tokens else None


@dataclass(slots=True)
class _Stream:
    """What the events of one stream said."""

    stamps: list[float]
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    done: bool = False
    last: float = 0.0


def check_status(exchange: Exchange) -> None:
    """Raise RequestFailed, kind `http_<status>`, unless the answer is a 2xx."""
    if not 200 <= exchange.status < 300:
        raise RequestFailed(f"http_{exchange.status}", error_message(exchange.body))


def error_message(body: bytes) -> str:
    """The server's own words, from the OpenAI envelope if it is one."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def read_exchange(exchange: Exchange, *, started: float, due: float) -> RequestRecord:
    """Turn a complete exchange into a record; never raises for what a server may send."""
    try:
        check_status(exchange)
        stream = _read_stream(exchange)
        if not stream.stamps:
            raise RequestFailed("empty", "the stream ended without any output")
        if not stream.done and stream.finish_reason is None:
            raise RequestFailed("incomplete", "the stream ended without finish_reason or [DONE]")
    except RequestFailed as failed:
        return failed_record(failed, exchange, started=started, due=due)
    usage = stream.usage or {}
    reported = _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    stamps = stream.stamps
    return RequestRecord(
        sent_at=exchange.sent_at - started,
        lag_seconds=exchange.sent_at - due,
        ttft_seconds=stamps[0] - exchange.sent_at,
        e2e_seconds=stream.last - exchange.sent_at,
        gaps=tuple(later - sooner for sooner, later in pairwise(stamps)),
        input_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(cached),
        output_tokens=reported if reported else len(stamps),
        num_chunks=len(stamps),
        counted_by="usage" if reported else "chunks",
        finish_reason=stream.finish_reason,
    )


def failed_record(
    failed: RequestFailed,
    exchange: Exchange | None,
    *,
    started: float,
    due: float,
    now: float = 0.0,
) -> RequestRecord:
    """A record of a request that failed, with what is known of its times."""
    sent = exchange.sent_at if exchange else due
    ended = exchange.ended_at if exchange else now
    retry_after = exchange.headers.get("retry-after") if exchange else None
    return RequestRecord(
        sent_at=sent - started,
        lag_seconds=sent - due,
        e2e_seconds=max(0.0, ended - sent),
        error=failed.kind,
        message=failed.message,
        retry_after_seconds=_seconds(retry_after),
    )


def output_times(exchange: Exchange) -> list[float]:
    """When output chunks arrived so far; what cannot be read is not output."""
    try:
        return _read_stream(exchange).stamps
    except RequestFailed:
        return []


def _read_stream(exchange: Exchange) -> _Stream:
    stream = _Stream(stamps=[])
    for now, data in events(exchange.pieces):
        stream.last = now
        if data.startswith(b"[DONE]"):
            stream.done = True
            break
        try:
            chunk = json.loads(data)
        except ValueError:
            raise RequestFailed("malformed", f"not JSON: {data[:80]!r}") from None
        if not isinstance(chunk, dict):
            raise RequestFailed("malformed", f"not a chunk: {data[:80]!r}")
        if chunk.get("error"):
            raise RequestFailed("stream_error", error_message(data))
        if isinstance(chunk.get("usage"), dict):
            stream.usage = chunk["usage"]
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            stream.finish_reason = choices[0].get("finish_reason") or stream.finish_reason
            if _carries_output(choices):
                stream.stamps.append(now)
    return stream


def _carries_output(choices: Sequence[Any]) -> bool:
    """A role chunk, an empty delta and a bare finish are not output."""
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        if choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(
            delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls")
        ):
            return True
    return False


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None
