"""The life of one HTTP request: when it waited, was computed, gave way, and what that adds up to.

Owns the phases: consecutive, from the arrival to the last byte handed to the socket, so that they
add up to what the client waited. Knows neither HTTP nor the core; facts are told to it.

    parse | tokenize | queue | prefill | first_sample | write | decode        | close
                                  cut by  preempted, recompute, preempted, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.types import FinishReason, PromptRow
from server.timings import RequestClock

# Of one stay; a longer prompt has its first and its newest chunks.
MAX_CHUNKS = 256


class Choice(Protocol):
    """What an answer in the making knows of one of its sequences."""

    num_tokens: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of time, in seconds of the monotonic clock."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions `start` to `start` + `length` of a sequence, computed in one step."""

    step: int
    start: int
    length: int
    began: float
    ended: float


@dataclass(slots=True)
class Stay:
    """From getting a slot to losing it. What is before `num_found` needed no computing."""

    slot: int
    began: float
    num_found: int
    chunks: list[Chunk] = field(default_factory=list)
    num_omitted: int = 0
    preempted: float | None = None

    def add(self, chunk: Chunk) -> None:
        if len(self.chunks) == MAX_CHUNKS:
            del self.chunks[MAX_CHUNKS // 2]
            self.num_omitted += 1
        self.chunks.append(chunk)

    @property
    def computed(self) -> float:
        """When the last chunk was done."""
        return self.chunks[-1].ended if self.chunks else self.began


class SequenceTimeline:
    """What the core did with one sequence of the request."""

    __slots__ = ("choice", "finish_reason", "id", "num_prompt", "num_tokens", "stays")

    def __init__(self, sequence_id: str, num_prompt: int, choice: Choice) -> None:
        self.id = sequence_id
        self.num_prompt = num_prompt
        self.choice: Choice | None = choice
        self.stays: list[Stay] = []
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def add_row(self, row: PromptRow, step: int, began: float, ended: float) -> None:
        if row.entered or not self.stays:
            self.stays.append(Stay(row.slot, began, row.start))
        self.stays[-1].add(Chunk(step, row.start, row.length, began, ended))

    def preempt(self, at: float) -> None:
        if self.stays:
            self.stays[-1].preempted = at

    @property
    def num_preemptions(self) -> int:
        return sum(stay.preempted is not None for stay in self.stays)

    def refresh(self) -> None:
        """Takes over what the choice knows by now."""
        if self.choice is not None:
            self.num_tokens = self.choice.num_tokens
            reason = self.choice.finish_reason
            self.finish_reason = None if reason is None else reason.value

    def close(self) -> None:
        self.refresh()
        self.choice = None

    def pauses(self, after: float | None, until: float) -> list[Span]:
        """Times without a slot, and of computing again what was lost of an answer begun `after`."""
        spans = []
        for index, stay in enumerate(self.stays):
            again = self.stays[index + 1] if index + 1 < len(self.stays) else None
            if index and after is not None and stay.began >= after:
                spans.append(Span("recompute", stay.began, min(stay.computed, until)))
            if stay.preempted is not None:
                spans.append(Span("preempted", stay.preempted, again.began if again else until))
        return spans


class RequestTimeline:
    """One HTTP request. `id` is what the client sees in x-request-id, `answer_id` is ours."""

    def __init__(
        self,
        request_id: str,
        answer_id: str,
        tenant: str,
        clock: RequestClock,
        sequences: Sequence[SequenceTimeline],
    ) -> None:
        self.id = request_id
        self.answer_id = answer_id
        self.tenant = tenant
        self.clock = clock
        self.sequences = tuple(sequences)
        self.num_prompt = 0
        self.num_cached = 0
        self.closed: float | None = None
        self.finish = ""

    def close(self, now: float, otherwise: str) -> None:
        """The end; `otherwise` is the reason of sequences that have none of their own."""
        for sequence in self.sequences:
            sequence.close()
            sequence.finish_reason = sequence.finish_reason or otherwise
        reasons = dict.fromkeys(s.finish_reason or otherwise for s in self.sequences)
        self.finish = "+".join(reasons)
        self.closed = now

    @property
    def cached_so_far(self) -> int:
        """Before the end only of a single sequence: what others share is no hit of theirs."""
        if self.closed is None and len(self.sequences) == 1 and self.sequences[0].stays:
            return self.sequences[0].stays[0].num_found
        return self.num_cached

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_preemptions(self) -> int:
        return sum(sequence.num_preemptions for sequence in self.sequences)

    @property
    def state(self) -> str:
        """The phase it is in, or `finished`."""
        if self.closed is not None:
            return "finished"
        return self.phases(self.clock.received)[-1].name

    @property
    def ttft_seconds(self) -> float | None:
        written = self.clock.first_written
        return None if written is None else written - self.clock.received

    @property
    def tpot_seconds(self) -> float | None:
        """Mean over the further tokens of the longest sequence; None before there is one."""
        first, last = self.clock.first_written, self.clock.finished
        longest = max((sequence.num_tokens for sequence in self.sequences), default=0)
        if first is None or last is None or longest < 2:
            return None
        return max(last - first, 0.0) / (longest - 1)

    def phases(self, now: float) -> list[Span]:
        """Consecutive spans from the arrival to the end, or to `now` while it goes on."""
        spans = self._base(now if self.closed is None else self.closed)
        if len(self.sequences) != 1 or spans[-1].ended <= spans[0].began:
            return spans
        pauses = self.sequences[0].pauses(self.clock.sampled, spans[-1].ended)
        return [part for span in spans for part in _cut(span, pauses)]

    def _base(self, end: float) -> list[Span]:
        clock = self.clock
        began = clock.received
        spans: list[Span] = []
        for name, instant in (
            ("parse", clock.parsed),
            ("tokenize", clock.tokenized),
            ("queue", clock.scheduled or self._first_entry()),
            ("prefill", clock.prefilled),
            ("first_sample", clock.sampled),
            ("write", clock.first_written),
            ("decode", clock.finished),
        ):
            if instant is None:
                return [*spans, Span(name, began, max(end, began))]
            ended = max(began, instant)
            spans.append(Span(name, began, ended))
            began = ended
        return [*spans, Span("close", began, max(end, began))]

    def _first_entry(self) -> float | None:
        entries = [sequence.stays[0].began for sequence in self.sequences if sequence.stays]
        return min(entries, default=None)


def _cut(span: Span, pauses: Sequence[Span]) -> list[Span]:
    """`span` with the pauses inside it as spans of their own; the sum stays the same."""
    if span.name not in ("prefill", "decode"):
        return [span]
    parts = []
    began = span.began
    for pause in pauses:
        start, end = max(pause.began, began), min(pause.ended, span.ended)
        if start >= end:
            continue
        if start > began:
            parts.append(Span(span.name, began, start))
        parts.append(Span(pause.name, start, end))
        began = end
    if began < span.ended or not parts:
        parts.append(Span(span.name, began, span.ended))
    return parts
