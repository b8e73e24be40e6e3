"""Timelines as JSON objects for /admin, and as a trace file that Perfetto and Chrome open.

Pure functions of what the recorder holds. Times in answers are milliseconds from the arrival of
the request; in a trace microseconds of the monotonic clock, which is what the format wants.
Format: "Trace Event Format", Google, of chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler.types import StepStats
from server.recorder import Recorder
from server.timeline import RequestTimeline, SequenceTimeline, Span

Json = dict[str, Any]
MAX_STEPS = 512  # of one timeline
STEPS, REQUESTS, SLOTS = 1, 2, 3  # processes of a trace


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def summary(timeline: RequestTimeline, now: float) -> Json:
    """One row of a table; everything but the steps."""
    for sequence in timeline.sequences:
        sequence.refresh()
    end = now if timeline.closed is None else timeline.closed
    phases: dict[str, float] = {}
    for span in timeline.phases(now):
        phases[span.name] = phases.get(span.name, 0.0) + span.ended - span.began
    return {
        "id": timeline.id,
        "answer_id": timeline.answer_id,
        "key": timeline.tenant,
        "state": timeline.state,
        "finish": timeline.finish or None,
        "age_ms": _ms(now - timeline.clock.received),
        "e2e_ms": _ms(end - timeline.clock.received),
        "ttft_ms": _ms(timeline.ttft_seconds),
        "tpot_ms": _ms(timeline.tpot_seconds),
        "prompt_tokens": timeline.num_prompt,
        "cached_tokens": timeline.cached_so_far,
        "completion_tokens": timeline.num_tokens,
        "num_sequences": len(timeline.sequences),
        "preemptions": timeline.num_preemptions,
        "phases_ms": {name: _ms(seconds) for name, seconds in phases.items()},
    }


def detail(timeline: RequestTimeline, recorder: Recorder) -> Json:
    """All that is known of one request, step by step."""
    now = recorder.now()
    zero = timeline.clock.received
    end = now if timeline.closed is None else timeline.closed
    entries = [sequence.stays[0].began for sequence in timeline.sequences if sequence.stays]
    steps = recorder.steps_between(min(entries), end) if entries else []
    body = summary(timeline, now)
    body["phases"] = _spans(timeline.phases(now), zero)
    body["sequences"] = [_sequence(sequence, zero) for sequence in timeline.sequences]
    body["steps"] = [_step(stats, zero) for stats in steps[-MAX_STEPS:]]
    body["num_steps"] = len(steps)
    return body


def _spans(spans: Iterable[Span], zero: float) -> list[Json]:
    return [
        {"phase": s.name, "start_ms": _ms(s.began - zero), "duration_ms": _ms(s.ended - s.began)}
        for s in spans
    ]


def _sequence(sequence: SequenceTimeline, zero: float) -> Json:
    return {
        "id": sequence.id,
        "prompt_tokens": sequence.num_prompt,
        "completion_tokens": sequence.num_tokens,
        "finish": sequence.finish_reason,
        "preemptions": sequence.num_preemptions,
        "stays": [
            {
                "slot": stay.slot,
                "start_ms": _ms(stay.began - zero),
                "preempted_ms": None if stay.preempted is None else _ms(stay.preempted - zero),
                "found_tokens": stay.num_found,
                "chunks": [
                    {
                        "step": chunk.step,
                        "start_ms": _ms(chunk.began - zero),
                        "duration_ms": _ms(chunk.ended - chunk.began),
                        "start": chunk.start,
                        "length": chunk.length,
                    }
                    for chunk in stay.chunks
                ],
                "chunks_omitted": stay.num_omitted,
            }
            for stay in sequence.stays
        ],
    }


def _step(stats: StepStats, zero: float) -> Json:
    return {
        "step": stats.step,
        "start_ms": _ms(stats.ended_at - stats.step_seconds - zero),
        "duration_ms": _ms(stats.step_seconds),
        "prefill_tokens": stats.num_prefill_tokens,
        "decode_tokens": stats.num_decode_tokens,
        "running": stats.num_running,
    }


# --- the trace file -------------------------------------------------------------------------------


def collect(
    recorder: Recorder, began: float, ended: float, sees: str | None = None
) -> tuple[list[StepStats], list[RequestTimeline]]:
    """What overlaps the time between two instants: the steps, and the requests that may be seen."""
    timelines = [
        timeline
        for timeline in (*reversed([*recorder.ended(sees)]), *recorder.running(sees))
        if timeline.clock.received <= ended and (timeline.closed or ended) >= began
    ]
    return recorder.steps_between(began, ended), timelines


def trace(steps: Iterable[StepStats], timelines: Iterable[RequestTimeline], now: float) -> Json:
    """A trace with a track of steps, one a request and one a slot."""
    events = [_name(STEPS, "steps"), _name(REQUESTS, "requests"), _name(SLOTS, "slots")]
    for stats in steps:
        events += _step_events(stats)
    for track, timeline in enumerate(timelines, 1):
        events += _request_events(timeline, track, now)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(pid: int, name: str) -> Json:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def _complete(pid: int, tid: int, name: str, began: float, ended: float, **args: Any) -> Json:
    at, duration = round(began * 1e6, 1), round(max(ended - began, 0.0) * 1e6, 1)
    found = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": at, "dur": duration}
    return {**found, "args": args} if args else found


def _step_events(stats: StepStats) -> Iterable[Json]:
    began = stats.ended_at - stats.step_seconds
    prefill, decode = stats.num_prefill_tokens, stats.num_decode_tokens
    kind = "mixed" if prefill and decode else "prefill" if prefill else "decode"
    yield _complete(
        STEPS,
        1,
        kind,
        began,
        stats.ended_at,
        step=stats.step,
        prefill_tokens=prefill,
        decode_tokens=decode,
        plan_ms=_ms(stats.plan_seconds),
        preempted=len(stats.preempted),
    )
    for name, values in (
        ("requests", {"running": stats.num_running, "waiting": stats.num_waiting}),
        ("blocks", {"used": stats.num_blocks_used, "cached": stats.num_blocks_cached}),
        ("tokens", {"prefill": prefill, "decode": decode}),
    ):
        yield {"ph": "C", "pid": STEPS, "name": name, "ts": round(began * 1e6, 1), "args": values}


def _request_events(timeline: RequestTimeline, track: int, now: float) -> Iterable[Json]:
    for sequence in timeline.sequences:
        sequence.refresh()
    yield {
        "ph": "M",
        "name": "thread_name",
        "pid": REQUESTS,
        "tid": track,
        "args": {"name": timeline.id},
    }
    end = now if timeline.closed is None else timeline.closed
    yield _complete(
        REQUESTS,
        track,
        f"request {timeline.id}",
        timeline.clock.received,
        end,
        answer_id=timeline.answer_id,
        key=timeline.tenant,
        finish=timeline.finish or timeline.state,
        prompt_tokens=timeline.num_prompt,
        cached_tokens=timeline.num_cached,
        completion_tokens=timeline.num_tokens,
        preemptions=timeline.num_preemptions,
    )
    for span in timeline.phases(now):
        yield _complete(REQUESTS, track, span.name, span.began, span.ended)
    for sequence in timeline.sequences:
        yield from _stay_events(timeline, sequence, end)


def _stay_events(
    timeline: RequestTimeline, sequence: SequenceTimeline, end: float
) -> Iterable[Json]:
    for stay in sequence.stays:
        left = stay.preempted if stay.preempted is not None else timeline.clock.finished or end
        yield _complete(
            SLOTS, stay.slot + 1, timeline.id, stay.began, left, found_tokens=stay.num_found
        )
        for chunk in stay.chunks:
            yield _complete(
                SLOTS,
                stay.slot + 1,
                "chunk",
                chunk.began,
                chunk.ended,
                step=chunk.step,
                start=chunk.start,
                length=chunk.length,
            )
